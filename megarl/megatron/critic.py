"""A critic: the policy's backbone with a value head, in the same layout, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron.policy import Policy
from megarl.megatron.sharding import SequenceSharding
from megarl.records import MicroBatch


class Critic(Policy):
    """V(prompt, response so far) at every position. Starts from the policy's weights of now, its head at zero."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(
            policy.architecture,
            policy.layout,
            policy.platform,
            policy.groups,
            policy.settings,
            distributed_optimizer=policy.distributed_optimizer,
            value_head=True,
        )
        with torch.no_grad():
            for own, other in zip(self.chunks, policy.chunks, strict=True):
                theirs = dict(other.named_parameters()) | dict(other.named_buffers())
                for name, tensor in (*own.named_parameters(), *own.named_buffers()):
                    if name.startswith("output_layer."):
                        tensor.zero_()
                    else:
                        tensor.copy_(theirs[name])

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Compute float32 [tokens] of every micro-batch by input position, on the CPU, without gradients; 0 where the
        mask is not set. Collective, as `Policy.compute_logprobs`."""
        return [values for (values,) in self.evaluate(micro_batches)]

    def _head(
        self, model: Any, hidden: Tensor, micro_batch: MicroBatch, sharding: SequenceSharding, _: float
    ) -> tuple[Tensor, ...]:
        hidden = hidden.squeeze(0)
        if self.layout.tensor > 1:
            # every tensor-parallel rank computes the same values, and so the same gradient
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head = model.module.output_layer if hasattr(model, "module") else model.output_layer
        here = self.shards.context_tokens(sharding)
        mask = sharding.take(micro_batch.mask, here, False)
        values = torch.where(mask, head.values(hidden), 0.0)
        return self.shards.by_input_position(values[:, None], sharding)
