"""Stand-in for sgl_kernel, SGLang's compiled kernels, which PyPI only has for CUDA.

One function is needed on a CPU and written here in torch. The others (quantization, speculative decoding) can
be imported, and say so when they are called. Its compiled operators (`torch.ops.sgl_kernel`) stay absent, by
which SGLang knows that it has no AMX kernels.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of the page table.

    req_pool_indices, start, end: int64 [requests]; req_to_token: [pool, pool_len], written in place at
    `[request, start:end]`; out_cache_loc: [sum of end - start], the slots, request after request.
    """
    offset = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[offset : offset + last - first]
        req_to_token[request, first:last] = slots.to(req_to_token.dtype)
        offset += last - first


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return missing
