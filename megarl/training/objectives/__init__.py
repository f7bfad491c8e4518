"""What a stage learns: an objective turns a micro-batch's columns and the policy's outputs into a loss."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megarl.algorithms import LossOutput
from megarl.records import MicroBatch


class Objective(Protocol):
    """A loss that is summed over micro-batches, replicas and context-parallel ranks, and divided by nothing: the
    column "weights" says how much each token counts in the global batch."""

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor, on_policy: bool) -> LossOutput:
        """Return the micro-batch's part of the loss and its metrics.

        outputs: what the head computes by input position, [tokens] each, with gradient: a policy's log-probabilities
        and entropies, or a critic's values. on_policy: no optimizer step has come since the rollout.
        """
        ...
