"""This rank's part of every packed micro-batch: which tokens it computes, and how whole vectors are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron.attention import PackedSequences, packed
from megarl.megatron.groups import Groups
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout
from megarl.megatron.sharding import SequenceSharding, shard_layout
from megarl.records import MicroBatch


@dataclass(frozen=True)
class RankShards:
    """Index arithmetic of `sharding.py` with this rank's coordinates.

    equal_shares: the token dispatcher gathers equally many tokens from all experts' ranks.
    """

    layout: Layout
    platform: Platform
    groups: Groups
    equal_shares: bool

    def sharding(self, micro_batch: MicroBatch, at_least: int = 0) -> SequenceSharding:
        layout = self.layout
        return shard_layout(
            micro_batch.cu_seqlens, context=layout.context, tensor=layout.tensor, at_least=at_least
        )

    def least_sizes(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Padded tokens that each micro-batch must have at least: those of the largest replica where shares must be
        equal, else 0. Collective."""
        if not self.equal_shares:
            return [0] * len(micro_batches)
        own = [len(self.sharding(m).source) for m in micro_batches]
        sizes = torch.tensor(own, device=self.platform.device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.groups.peers_group)
        return sizes.tolist()  # type: ignore[no-any-return]

    def context_tokens(self, sharding: SequenceSharding) -> Tensor:
        """int64: the padded positions of this context-parallel rank."""
        return sharding.local(parallel_state.get_context_parallel_rank())

    def router_tokens(self, sharding: SequenceSharding) -> Tensor:
        """int64: the padded positions that this rank's routers see."""
        return sharding.shard(
            parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
        )

    def attention_input(self, sharding: SequenceSharding) -> PackedSeqParams:
        """What attention must know of the sequences' bounds."""
        if self.platform.transformer_engine:
            return PackedSeqParams(**packed(sharding))
        return PackedSequences.make(sharding, self._context_group)

    def by_input_position(self, here: Tensor, sharding: SequenceSharding) -> tuple[Tensor, ...]:
        """Put n vectors together: this context rank's [tokens here, n] -> n of [tokens], whole on every rank, the
        gradient flowing into this rank's tokens alone."""
        if self._context_group is not None:
            # every context rank computes the same loss from all tokens and keeps its own tokens' gradient
            here = gather_from_sequence_parallel_region(
                here, tensor_parallel_output_grad=False, group=self._context_group
            )
        return here[sharding.restore].unbind(1)

    @property
    def _context_group(self) -> dist.ProcessGroup | None:
        return parallel_state.get_context_parallel_group() if self.layout.context > 1 else None
