"""Run an unmodified SGLang on a CPU that has neither CUDA nor AMX.

Three things stand between SGLang 0.5.x and such a machine, and each is met by an official door:

- it imports `triton`, `torchvision` and `sgl_kernel`, of which nothing runs on a CPU: `stand_ins/` holds
  importable stand-ins, put on the path by the launcher (`python -m sglang_cpu`) and by nothing else;
- it allocates the host buffer of routed experts in memory pinned for CUDA: the plugin `register` allocates
  plain memory instead (entry point group `sglang.srt.plugins`, loaded by SGLang in each of its processes);
- its defaults assume a GPU: the launcher sets the few environment variables and arguments that do not.

This package belongs into SGLang's own environment, never into the trainer's.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """SGLang plugin: host memory for the "cpu" device is allocated without `cudaHostRegister`."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(
        dims: tuple[int, ...],
        dtype: Any,
        device: str,
        pin_memory: bool,
        allocator: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
