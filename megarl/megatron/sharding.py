"""Where the tokens of a packed micro-batch lie on the ranks of a replica. Index arithmetic only.

Every sequence is padded at its end to a length that context parallelism can split, and cut into 2 x context chunks
of which rank r takes the chunks r and 2 x context - 1 - r: Transformer Engine's load-balanced ("zigzag") split for
packed sequences. A tail of padding makes each rank's share divisible by the tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceSharding:
    """cu_seqlens: int32 [padded sequences + 1]; the last sequence may be nothing but padding.
    source: int64 [padded tokens], the input position of the micro-batch that lies there, -1 for padding.
    context, tensor: degrees of parallelism.
    """

    cu_seqlens: Tensor
    source: Tensor
    context: int
    tensor: int

    @cached_property
    def _owner(self) -> Tensor:
        """int64 [padded tokens], the context rank that holds each."""
        lengths = self.cu_seqlens.diff().long()
        starts = self.cu_seqlens[:-1].long().repeat_interleave(lengths)
        chunk = lengths.repeat_interleave(lengths) // (2 * self.context)
        number = (torch.arange(len(self.source), device=starts.device) - starts) // chunk
        return torch.minimum(number, 2 * self.context - 1 - number)

    def local(self, context_rank: int) -> Tensor:
        """int64 [padded tokens / context]: which padded positions this context rank holds, in its order."""
        if self.context == 1:
            return torch.arange(len(self.source), device=self.source.device)
        return (self._owner == context_rank).nonzero().squeeze(1)

    def shard(self, context_rank: int, tensor_rank: int) -> Tensor:
        """int64: the part of `local` that a tensor-parallel rank holds between its sequence-parallel regions."""
        return self.local(context_rank).chunk(self.tensor)[tensor_rank]

    @cached_property
    def gathered(self) -> Tensor:
        """int64 [padded tokens]: where each padded position lies in all context ranks' tokens end to end."""
        order = torch.cat([self.local(rank) for rank in range(self.context)])
        return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    @cached_property
    def restore(self) -> Tensor:
        """int64 [tokens]: where each input position lies in all context ranks' tokens end to end."""
        real = self.source >= 0
        return torch.empty_like(self.gathered[real]).scatter_(0, self.source[real], self.gathered[real])

    def take(self, values: Tensor, positions: Tensor, padding: int | bool = 0) -> Tensor:
        """`values` [tokens, ...] by input position, at these padded positions."""
        source = self.source[positions]
        taken = values[source.clamp(min=0)]
        return torch.where((source < 0).view(-1, *[1] * (taken.dim() - 1)), padding, taken)


def shard_layout(
    cu_seqlens: Tensor, *, context: int = 1, tensor: int = 1, at_least: int = 0
) -> SequenceSharding:
    """cu_seqlens: int32 [sequences + 1], of a micro-batch as it was packed. at_least: padded tokens."""
    unit = 2 * context if context > 1 else 1
    lengths = cu_seqlens.diff().long()
    padded = (lengths + unit - 1) // unit * unit
    multiple = math.lcm(unit, context * tensor)
    whole = -(-max(int(padded.sum()), at_least) // multiple) * multiple
    if missing := whole - int(padded.sum()):
        padded = torch.cat([padded, padded.new_tensor([missing])])
    bounds = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    source = torch.full((int(bounds[-1]),), -1, dtype=torch.int64, device=cu_seqlens.device)
    shift = (bounds[: len(lengths)] - cu_seqlens[:-1]).repeat_interleave(lengths)
    tokens = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    source[tokens + shift] = tokens
    return SequenceSharding(bounds.int(), source, context, tensor)
