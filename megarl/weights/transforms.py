"""How one or more Hugging Face tensors lie in one Megatron tensor, and how that splits over ranks.

`copy_into_shard` puts one HF tensor into its part of a rank's shard, so that loading never holds more than the shard
and one HF tensor; `separate` takes a whole Megatron tensor apart again. Both are exact: HF -> Megatron -> HF gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """The same tensor. axis: where tensor parallelism splits it; None = every rank has all of it."""

    axis: int | None = None

    def copy_into_shard(self, shard: Tensor, part: Tensor, number: int, rank: int, size: int) -> None:
        """Copy HF tensor `number` of those that make up the Megatron tensor into `shard`, rank's share of size."""
        shard.copy_(part if self.axis is None else part.chunk(size, self.axis)[rank])

    def separate(self, whole: Tensor) -> list[Tensor]:
        """Take a whole Megatron tensor apart into its HF tensors."""
        return [whole]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Join every rank's shard to the whole tensor."""
        if self.axis is None or len(shards) == 1:
            return shards[0]
        return torch.cat(list(shards), self.axis)

    def whole_shape(self, shard: Tensor, size: int) -> list[int]:
        """Return the shape of the whole tensor of which `shard` is one of `size` shards."""
        return [n * size if axis == self.axis else n for axis, n in enumerate(shard.shape)]


@dataclass(frozen=True)
class PadVocabulary(Copy):
    """Embedding and LM head: rows are padded with zeros up to a multiple of the tensor-parallel size."""

    vocab_size: int = 0
    axis: int | None = 0

    def copy_into_shard(self, shard: Tensor, part: Tensor, number: int, rank: int, size: int) -> None:
        rows = part[rank * shard.shape[0] :][: shard.shape[0]]
        shard[: rows.shape[0]].copy_(rows)
        shard[rows.shape[0] :].zero_()

    def separate(self, whole: Tensor) -> list[Tensor]:
        return [whole[: self.vocab_size]]


@dataclass(frozen=True)
class FuseQKV(Copy):
    """q, k, v -> megatron-core's linear_qkv: for each query group its query heads, its key, its value.

    Weights [rows, hidden] and biases [rows].
    """

    groups: int = 1
    heads: int = 1
    head_dim: int = 1
    axis: int | None = 0

    def _by_group(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Return views of q, k, v, each [groups in `fused`, rows of a group, ...]."""
        sizes = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        return fused.view(-1, sum(sizes), *fused.shape[1:]).split(sizes, dim=1)

    def copy_into_shard(self, shard: Tensor, part: Tensor, number: int, rank: int, size: int) -> None:
        rows = shard.shape[0]
        fused = self._by_group(torch.arange(rows * size, device=part.device))[number].reshape(-1)
        here = fused // rows == rank  # a rank may hold part of a group: more ranks than groups
        shard[fused[here].to(shard.device) - rank * rows] = part[here].to(shard)

    def separate(self, whole: Tensor) -> list[Tensor]:
        return [part.reshape(-1, *whole.shape[1:]) for part in self._by_group(whole)]


@dataclass(frozen=True)
class FuseGateUp(Copy):
    """gate, up -> linear_fc1: [gate; up] along the rows, and each rank's shard is [its gate rows; its up rows]."""

    axis: int | None = 0

    def copy_into_shard(self, shard: Tensor, part: Tensor, number: int, rank: int, size: int) -> None:
        shard.chunk(2)[number].copy_(part.chunk(size)[rank])

    def separate(self, whole: Tensor) -> list[Tensor]:
        return list(whole.chunk(2))

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
