"""What SGLang 0.5.x lacks on a CPU without AMX, in plain torch: the same numbers as on a GPU, but for rounding.

| SGLang | on such a CPU | here |
|---|---|---|
| the host buffer of routed experts | is pinned for CUDA | plain memory |
| latent attention, prefill | `torch_native` writes heads into a cache of latents | the absorbed form, as in decoding |
| latent attention, rotary positions | only with YaRN | as on a GPU |
| Qwen2-MoE's gate of the shared expert | a triton kernel | three operations |
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    rotary, gate = "sglang.srt.layers.rotary_embedding.factory", "sglang.kernels.ops.elementwise.elementwise"
    HookRegistry.register(f"{rotary}.get_rope_cpu", rope, HookType.AROUND)
    HookRegistry.register(f"{gate}.fused_gate_sigmoid_mul_add", add_gated, HookType.REPLACE)


def allocate(
    dims: tuple[int, ...],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Allocate host memory for the "cpu" device without `cudaHostRegister`."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def rope(with_yarn: Any, *args: Any, **kwargs: Any) -> Any:
    """Make rotary positions: with YaRN as SGLang does on a CPU, without it as on a GPU."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    names = ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling", "dtype")
    given = dict(zip((*names, "partial_rotary_factor", "device"), args, strict=False)) | kwargs
    if given.get("rope_scaling") is not None:
        return with_yarn(*args, **kwargs)
    given.pop("device", None)
    return get_rope(**given)


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> None:
    """Add the shared expert behind its sigmoid gate, in place. hidden, shared, routed: [tokens, hidden_size]; gate:
    [hidden_size]."""
    routed += torch.sigmoid(hidden.float() @ gate.float())[:, None].to(shared) * shared
