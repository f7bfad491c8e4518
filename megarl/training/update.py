"""Everything between a rollout and the weight sync: passes over it, advantages, token weights, optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.algorithms import (
    LogprobAndRouteSource,
    Recipe,
    add_token_weights,
    advantage_metrics,
    assign_advantages,
)
from megarl.megatron.policy import Policy
from megarl.records import Batch
from megarl.routing.agreement import routing_metrics
from megarl.routing.replay import Mode
from megarl.training.learning import Learned, learn, reduce_over_ranks
from megarl.training.objectives.policy_gradient import PolicyGradient, ValueRegression
from megarl.training.scoring import with_old_logprobs, with_ref_logprobs, with_values
from megarl.training.stages.stage import AuxiliaryModels


class PolicyUpdate:
    """The update of a policy, and of the critic beside it, by a rollout.

    sources: where old log-probabilities and routes come from. temperature: of sampling. max_new_tokens: the generation
    budget, which `constant` weights divide by.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        sources: LogprobAndRouteSource,
        models: AuxiliaryModels,
        *,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        self.policy, self.recipe, self.sources, self.models = policy, recipe, sources, models
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.objective = PolicyGradient(recipe, current_is_old=sources.old_logprobs == "current")

    def score(self, batches: Sequence[Batch]) -> list[Batch]:
        """Add the columns that the objective reads: log-probabilities, values, advantages, weights. Collective."""
        recipe, sources, reduce_sum = self.recipe, self.sources, self.policy.groups.sum_over_replicas
        source = sources.old_logprobs
        if source == "current" and "old_logprobs" in recipe.needs:  # by the advantages
            source = "recompute"
        batches = with_old_logprobs(
            batches,
            self.policy,
            source=source,
            recorded=sources.routing_replay == "recorded",
            temperature=self.temperature,
            replay="replay" if sources.routing_replay == "engine" else "live",
        )
        if self.models.reference is not None:
            batches = with_ref_logprobs(batches, self.policy, self.models.reference, self.temperature)
        if self.models.critic is not None:
            batches = with_values(batches, self.models.critic)
        batches = assign_advantages(batches, recipe, reduce_sum)
        return [
            add_token_weights(batch, recipe, max_length=self.max_new_tokens, reduce_sum=reduce_sum)
            for batch in batches
        ]

    def learn(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Take one optimizer step of the policy, and of the critic, for each scored mini-batch. Collective."""
        has_routes = any(m.routes is not None for batch in batches for m in batch.micro_batches)
        forced = self.sources.routing_replay != "off"
        mode: Mode = "replay" if forced else "observe" if has_routes else "live"
        learned = learn(
            self.policy,
            batches,
            self.objective,
            temperature=self.temperature,
            replay=mode,
            count_routes=has_routes,
        )
        metrics = learned.metrics | _step_metrics(batches, learned, self.policy.groups.replica_count)
        rewards = torch.cat([batch.rewards for batch in batches])
        group_ids = torch.cat([batch.group_ids for batch in batches])
        found = advantage_metrics(rewards=rewards, group_ids=group_ids)
        metrics |= reduce_over_ranks([found], self.policy.groups)
        if self.models.critic is not None:
            valued = learn(self.models.critic, batches, ValueRegression(self.recipe))
            metrics |= valued.metrics
            metrics["train/skipped_steps"] += sum(not step.stepped for step in valued.steps)
        return metrics


def _step_metrics(batches: Sequence[Batch], learned: Learned, replicas: int) -> dict[str, float]:
    metrics = {
        "train/optimizer_steps": float(sum(step.stepped for step in learned.steps)),
        "train/skipped_steps": float(learned.skipped),
        "train/micro_batches": float(sum(len(batch.micro_batches) for batch in batches) * replicas),
    }
    if learned.counts:
        metrics |= routing_metrics(learned.counts[0], learned.counts[-1])
    if learned.steps:
        norms = [step.grad_norm for step in learned.steps]
        metrics |= {"train/grad_norm": float(np.mean(norms)), "train/lr": learned.steps[-1].lr}
    return metrics
