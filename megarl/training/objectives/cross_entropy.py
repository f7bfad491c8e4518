"""Supervised fine-tuning: the weighted cross-entropy of the tokens that are to be learned."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms import LossOutput
from megarl.algorithms.metrics import loss_of
from megarl.records import MicroBatch


@dataclass(frozen=True)
class CrossEntropy:
    """-sum_t w_t log pi(y_t): with `token_mean` weights the mean over all learned tokens of the global batch."""

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor, on_policy: bool = False) -> LossOutput:
        logprobs = outputs[0]
        loss = -(micro_batch.columns["weights"] * logprobs).sum()
        return LossOutput(loss, {"sft/loss": loss_of(loss)})
