"""Learning from prepared mini-batches: one optimizer step for each, whatever the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import average_steps, combine, finalize, reduce_metrics
from megarl.algorithms.metrics import Metrics, PartialMetric
from megarl.megatron.groups import Groups
from megarl.megatron.policy import Policy, StepResult
from megarl.records import Batch
from megarl.routing.agreement import RoutingCounts
from megarl.routing.replay import Mode
from megarl.training.objectives import Objective


@dataclass(frozen=True)
class Learned:
    """What came of some mini-batches.

    metrics: the objective's, over all of them and all ranks. steps: of the optimizer, in order. skipped: mini-batches
    without a step: nothing active in them, or a gradient that is not finite. counts: routing of the first and the last
    step, where routes were counted.
    """

    metrics: dict[str, float]
    steps: tuple[StepResult, ...]
    skipped: int
    counts: tuple[RoutingCounts, ...] = ()


def learn(
    policy: Policy,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    temperature: float = 1.0,
    replay: Mode = "live",
    count_routes: bool = False,
) -> Learned:
    """Take one optimizer step for each mini-batch that has an active token anywhere, in order. Collective.

    replay: what routers do with the micro-batches' routes, see `Policy.step`. count_routes: how live routing differs
    from them is counted in the first and the last step.
    """
    learned_from = [batch for batch in batches if batch.active_tokens]
    parts: list[Metrics] = []
    steps: list[StepResult] = []
    counts: list[RoutingCounts] = []
    for batch in learned_from:
        counted = count_routes and batch in (learned_from[0], learned_from[-1])
        result = policy.step(
            batch.micro_batches,
            partial(objective.loss, on_policy=not steps),
            temperature=temperature,
            replay=replay if replay != "observe" or counted else "live",
            count_routes=counted,
        )
        if counted:
            counts.append(policy.routing_counts())
        parts.append(_on_every_stage(result, policy.groups))
        steps.append(result)
    skipped = len(batches) - sum(result.stepped for result in steps)
    return Learned(reduce_over_ranks(parts, policy.groups), tuple(steps), skipped, tuple(counts))


def _on_every_stage(result: StepResult, groups: Groups) -> Metrics:
    """A step's metrics, on every pipeline stage, on the CPU: a tensor arrives where the sender had it, and its GPU is
    not ours."""
    own = {name: PartialMetric(m.kind, m.value.cpu()) for name, m in combine(result.collected).items()}
    return groups.share_from_last_stage(own)


def reduce_over_ranks(parts: Sequence[Metrics], groups: Groups) -> dict[str, float]:
    """Reduce the metrics of several optimizer steps to one set of numbers, the same on every rank: means weighted over
    mini-batches, losses a step on average. Collective."""
    if not parts:
        return {}

    def reduced(vector: Tensor, op: Any) -> Tensor:
        vector = vector.to(groups.device)
        torch.distributed.all_reduce(vector, op=op, group=groups.peers_group)
        return vector

    return finalize(
        reduce_metrics(
            average_steps(parts),
            sum_ranks=lambda v: reduced(v, torch.distributed.ReduceOp.SUM),
            max_ranks=lambda v: reduced(v, torch.distributed.ReduceOp.MAX),
        )
    )
