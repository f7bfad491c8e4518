"""What the trainer computes about a rollout before it learns from it: each pass adds a column to the micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms import combine, mismatch_metrics
from megarl.megatron.critic import Critic
from megarl.megatron.policy import Policy
from megarl.megatron.reference import ReferencePolicy
from megarl.records import Batch, MicroBatch
from megarl.routing.replay import GivenRoutes, Mode
from megarl.routing.store import RouteStore
from megarl.training.learning import reduce_over_ranks

AUDITED = ("audit/abs_diff_mean", "audit/abs_diff_max", "audit/k3", "audit/ratio_outside", "audit/tokens")


def with_old_logprobs(
    batches: Sequence[Batch], policy: Policy, *, source: str, recorded: bool, temperature: float, replay: Mode
) -> list[Batch]:
    """Add the column "old_logprobs": the engine's, or of one forward pass by the policy as it is. Collective.

    source: "engine" | "recompute" | "current" (no column: the old policy is the current one). recorded: the pass's
    routes are recorded, and become the micro-batches' routes (R2). replay: what the pass does with given routes (R3).
    """
    if source == "engine":
        return add_column(
            batches, "old_logprobs", (m.columns["engine_logprobs"] for m in micro_batches_of(batches))
        )
    if recorded:
        assert policy.replay is not None
        with policy.replay.recording() as routes:
            old = _logprobs(batches, policy, temperature)
        batches = add_column(batches, "old_logprobs", old)
        rest = iter(routes)
        return [b.with_micro_batches(m.with_routes(next(rest)) for m in b.micro_batches) for b in batches]
    if source == "recompute":
        return add_column(batches, "old_logprobs", _logprobs(batches, policy, temperature, replay))
    return list(batches)


def with_ref_logprobs(
    batches: Sequence[Batch], policy: Policy, reference: ReferencePolicy, temperature: float
) -> list[Batch]:
    """Add the column "ref_logprobs", of the reference policy with live routing. Collective."""
    with reference.in_place():
        return add_column(batches, "ref_logprobs", _logprobs(batches, policy, temperature))


def with_values(batches: Sequence[Batch], critic: Critic) -> list[Batch]:
    """Add the column "values", of the critic before it learns. Collective."""
    return add_column(batches, "values", critic.values(micro_batches_of(batches)))


def with_engine_routes(batches: Sequence[Batch], store: RouteStore, policy: Policy) -> list[Batch]:
    """Give each micro-batch the engine's routes of its samples, read from the store when its pass begins."""
    assert policy.replay is not None
    shape = (sum(map(len, policy.replay.layers)), policy.architecture.top_k)

    def load(sample_ids: Sequence[str]) -> Tensor:
        return store.packed(sample_ids, shape).to(policy.platform.device)

    def routed(micro_batch: MicroBatch, batch: Batch) -> MicroBatch:
        sample_ids = [batch.samples[row].sample_id for row in micro_batch.rows.tolist()]
        return micro_batch.with_routes(GivenRoutes(partial(load, sample_ids)))

    return [b.with_micro_batches(routed(m, b) for m in b.micro_batches) for b in batches]


def audit(batch: Batch, policy: Policy, temperature: float) -> dict[str, float]:
    """Measure how far the engine's log-probabilities are from a forward pass of its own, with live routing even where
    routes are replayed. Before the rollout's first optimizer step. Collective."""
    device, parts = policy.platform.device, []  # where metrics are summed over ranks
    for logprobs, m in zip(_logprobs([batch], policy, temperature), batch.micro_batches, strict=True):
        vectors = (logprobs, m.columns["engine_logprobs"], m.mask, m.cu_seqlens)
        found = mismatch_metrics(*(vector.to(device) for vector in vectors))
        parts.append({name: found[f"mismatch/{name.removeprefix('audit/')}"] for name in AUDITED})
    return reduce_over_ranks([combine(parts)], policy.groups)


def store_metrics(store: RouteStore, policy: Policy) -> dict[str, float]:
    """Measure a rollout's routes: bytes of all layers, whichever ranks hold them (a replica's ranks of one stage hold
    the same), and stale tokens. Collective."""
    groups, layout = policy.groups, policy.layout
    sums = torch.tensor([store.bytes, store.tokens, store.stale], dtype=torch.float64, device=groups.device)
    torch.distributed.all_reduce(sums)
    copies = layout.tensor * layout.context
    size, tokens, stale = (sums / copies).tolist()
    tokens, stale = tokens / layout.pipeline, stale / layout.pipeline
    return {"routing/bytes_per_token": size / max(tokens, 1), "routing/stale_tokens": stale}


def micro_batches_of(batches: Sequence[Batch]) -> list[MicroBatch]:
    return [m for b in batches for m in b.micro_batches]


def add_column(batches: Sequence[Batch], name: str, column: Iterable[Tensor]) -> list[Batch]:
    """Add a column to every micro-batch. column: one vector [tokens] for each, in order."""
    rest = iter(column)
    return [
        b.with_micro_batches(m.with_columns(**{name: next(rest)}) for m in b.micro_batches) for b in batches
    ]


def _logprobs(
    batches: Sequence[Batch], policy: Policy, temperature: float, replay: Mode = "live"
) -> list[Tensor]:
    passes = policy.compute_logprobs(micro_batches_of(batches), temperature=temperature, replay=replay)
    return [logprobs for logprobs, _ in passes]
