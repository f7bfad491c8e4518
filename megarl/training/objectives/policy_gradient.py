"""Reinforcement learning: a recipe's policy loss, and the loss of a critic beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms import LossOutput, Recipe, mismatch_metrics, policy_loss, value_loss
from megarl.records import MicroBatch


@dataclass(frozen=True)
class PolicyGradient:
    """The recipe's loss of the columns "advantages", "weights", "engine_logprobs", "old_logprobs" and, where the recipe
    has a KL, "ref_logprobs".

    current_is_old: the old policy is the current one (one optimizer step per rollout): no column is read for it.
    """

    recipe: Recipe
    current_is_old: bool = False

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor, on_policy: bool) -> LossOutput:
        logprobs, entropies = outputs
        columns = micro_batch.columns
        mask, cu_seqlens, engine = micro_batch.mask, micro_batch.cu_seqlens, columns["engine_logprobs"]
        output = policy_loss(
            self.recipe,
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if self.current_is_old else columns["old_logprobs"],
            advantages=columns["advantages"],
            mask=mask,
            cu_seqlens=cu_seqlens,
            weights=columns["weights"],
            engine_logprobs=engine,
            ref_logprobs=columns.get("ref_logprobs"),
            entropy=entropies if self.recipe.entropy_coef else entropies.detach(),
        )
        if not on_policy:
            return output
        # the engine still has this policy's weights, so the comparison costs nothing
        compared = mismatch_metrics(logprobs.detach(), engine, mask, cu_seqlens)
        return output._replace(metrics=output.metrics | compared)


@dataclass(frozen=True)
class ValueRegression:
    """The clipped squared error of a critic's values against the column "returns" (PPO, arXiv:1707.06347)."""

    recipe: Recipe

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor, on_policy: bool = False) -> LossOutput:
        columns = micro_batch.columns
        loss, metrics = value_loss(
            values=outputs[0],
            old_values=columns["values"],
            returns=columns["returns"],
            mask=micro_batch.mask,
            weights=columns["weights"],
            value_clip=self.recipe.value_clip,
        )
        return LossOutput(loss, metrics)
