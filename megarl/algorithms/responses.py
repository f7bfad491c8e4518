"""Packed responses: which token belongs to which, sums over a response, and values spread back to its tokens.

Every [T] vector holds whole packed sequences end to end; `mask` says which positions count ("active"),
`cu_seqlens` where each response begins and ends. Nothing here needs to know what the masked positions are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

SumReduce = Callable[[Tensor], Tensor]


class Responses(NamedTuple):
    """The responses of a packed batch, or of this rank's chunk of one.

    mask: bool [T]. rows: int32 [T], each token's response; R for a token of none (padding past the last one).
    local: float64 [R], active tokens here. active: float64 [R], active tokens of the whole response.
    reduce: sums a [R] vector over the ranks that share the responses (context parallelism); None = nobody
    shares. Carries no gradient and never synchronises with the host.
    """

    mask: Tensor
    rows: Tensor
    local: Tensor
    active: Tensor
    reduce: SumReduce | None

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor, reduce: SumReduce | None = None) -> Responses:
        """mask: bool [T]. cu_seqlens: [R + 1], ascending; equal neighbours are an empty response."""
        if mask.dtype != torch.bool or mask.ndim != 1 or cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
            raise ValueError(
                f"mask must be bool [T] and cu_seqlens [R + 1], not {mask.dtype} {list(mask.shape)} "
                f"and {list(cu_seqlens.shape)}"
            )
        positions = torch.arange(len(mask), device=mask.device, dtype=cu_seqlens.dtype)
        rows = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True, out_int32=True)
        local = _sum(mask, rows, len(cu_seqlens) - 1)
        return cls(mask, rows, local, local if reduce is None else reduce(local.clone()), reduce)

    @property
    def share(self) -> Tensor:
        """float64 [R]: how much of each response is here. Sums to 1 over its ranks, 0 without active
        tokens."""
        return self.local / self.active.clamp(min=1)

    def clean(self, values: Tensor, name: str) -> Tensor:
        """float32 [T] with 0 at masked positions, whatever stood there (NaN too); its gradient there is
        exactly 0."""
        return clean(self.mask, values, name)

    def sum(self, values: Tensor) -> Tensor:
        """float64 [R]: sum over each response's tokens, without gradient. values: [T], 0 where masked."""
        total = _sum(values.detach(), self.rows, len(self.local))
        return total if self.reduce is None else self.reduce(total)

    def mean(self, values: Tensor) -> Tensor:
        """float64 [R]: mean over active tokens; 0 for a response without any."""
        return self.sum(values) / self.active.clamp(min=1)

    def spread(self, per_response: Tensor) -> Tensor:
        """float32 [T]: each response's value at its tokens, 0 for tokens of none. per_response: [R], no
        gradient.

        An empty vector stands for "no responses": a filler micro-batch packs one padding token and has no
        rows.
        """
        if len(per_response) not in (0, len(self.local)):
            raise ValueError(f"{len(per_response)} values for {len(self.local)} responses")
        padded = pad(per_response.detach().float(), (0, len(self.local) + 1 - len(per_response)))
        return padded.index_select(0, self.rows)

    def per_token(self, values: Tensor, name: str) -> Tensor:
        """float32 [T], clean. values: [R] (one for each response; also where R = T) or [T]."""
        per_response = len(values) in (0, len(self.local)) and values.ndim == 1
        return self.clean(self.spread(values) if per_response else values, name)


def clean(mask: Tensor, values: Tensor, name: str) -> Tensor:
    """`Responses.clean` for a mask alone. Raises ValueError for values of another shape."""
    if values.shape != mask.shape:
        raise ValueError(f"{name} has shape {list(values.shape)}, the mask {list(mask.shape)}")
    return torch.where(mask, values.float(), 0.0)


def _sum(values: Tensor, rows: Tensor, count: int) -> Tensor:
    # float64: a long response's sum keeps its digits, and the order of a GPU's additions stays invisible
    out = torch.zeros(count + 1, dtype=torch.float64, device=values.device)
    return out.index_add(0, rows, values.double())[:count]
