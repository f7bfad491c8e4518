"""Run an unmodified SGLang on a CPU that has neither CUDA nor AMX.

Three things stand between SGLang 0.5.x and such a machine, and each is met by an official door:

- it imports `triton`, `torchvision` and `sgl_kernel`, of which nothing runs on a CPU: `stand_ins/` holds
  importable stand-ins, put on the path by the launcher (`python -m sglang_cpu`) and by nothing else;
- a few of its functions know GPUs, or CPUs with AMX, alone: the plugin `register` (entry point group
  `sglang.srt.plugins`, loaded by SGLang in each of its processes) replaces them, see `plugin`;
- its defaults assume a GPU: the launcher sets the few environment variables and arguments that do not.

This package belongs into SGLang's own environment, never into the trainer's.
"""

from __future__ import annotations


def register() -> None:
    """SGLang plugin: see `plugin`, which imports SGLang."""
    from sglang_cpu.plugin import register

    register()
