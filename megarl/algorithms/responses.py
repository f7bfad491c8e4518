"""Packed responses: which token belongs to which, sums over a response, and values spread back to its tokens.

Every [tokens] vector holds whole packed sequences end to end; `mask` says which positions count ("active"),
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
    """The responses of a packed batch.

    mask: bool [tokens]. rows: int32 [tokens], each token's response; the number of responses for a token of
    none (padding past the last one). active: float64 [responses], active tokens of each. Carries no gradient
    and never synchronises with the host.
    """

    mask: Tensor
    rows: Tensor
    active: Tensor

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor) -> Responses:
        """mask: bool [tokens]. cu_seqlens: [responses + 1], ascending; equal neighbours are an empty response."""
        if mask.dtype != torch.bool or mask.ndim != 1 or cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
            raise ValueError(
                f"mask must be bool [tokens] and cu_seqlens [responses + 1], not {mask.dtype} {list(mask.shape)} "
                f"and {list(cu_seqlens.shape)}"
            )
        positions = torch.arange(len(mask), device=mask.device, dtype=cu_seqlens.dtype)
        rows = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True, out_int32=True)
        return cls(mask, rows, _sum(mask, rows, len(cu_seqlens) - 1))

    @property
    def present(self) -> Tensor:
        """float64 [responses]: 1 for a response with an active token, else 0."""
        return (self.active > 0).double()

    def clean(self, values: Tensor, name: str) -> Tensor:
        """float32 [tokens] with 0 at masked positions, whatever stood there (NaN too), and no gradient there."""
        return clean(self.mask, values, name)

    def sum(self, values: Tensor) -> Tensor:
        """float64 [responses]: sum over each response's tokens, without gradient. values: [tokens], 0 where masked."""
        return _sum(values.detach(), self.rows, len(self.active))

    def mean(self, values: Tensor) -> Tensor:
        """float64 [responses]: mean over active tokens; 0 for a response without any."""
        return self.sum(values) / self.active.clamp(min=1)

    def spread(self, per_response: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[tokens] of this type, without gradient: each response's value at its tokens, 0 for tokens of none."""
        if per_response.shape != self.active.shape:
            raise ValueError(f"{list(per_response.shape)} values for {len(self.active)} responses")
        return pad(per_response.detach().to(dtype), (0, 1)).index_select(0, self.rows)


def clean(mask: Tensor, values: Tensor, name: str) -> Tensor:
    """`Responses.clean` for a mask alone. Raises ValueError for values of another shape."""
    if values.shape != mask.shape:
        raise ValueError(f"{name} has shape {list(values.shape)}, the mask {list(mask.shape)}")
    return torch.where(mask, values.float(), 0.0)


def _sum(values: Tensor, rows: Tensor, count: int) -> Tensor:
    # float64: a long response's sum keeps its digits, and the order of a GPU's additions stays invisible
    out = torch.zeros(count + 1, dtype=torch.float64, device=values.device)
    return out.index_add(0, rows, values.double())[:count]
