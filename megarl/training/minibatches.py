"""From groups and sequences to packed mini-batches, equally many micro-batches in each on every replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megarl.data.packing import TokenSequence, make_micro_batches, micro_batch_count, scatter_response
from megarl.megatron.policy import Policy
from megarl.records import Batch, Group, MicroBatch, Sample
from megarl.seeds import draw_seed


def make_minibatches(
    groups: Sequence[Group],
    minibatches: int,
    policy: Policy,
    *,
    token_budget: int,
    seed: int,
    step: int,
) -> list[Batch]:
    """Split the kept groups' responses into mini-batches of whole groups where they suffice, in an order of this step's
    own. Unscored responses are masked. Every micro-batch has the column "engine_logprobs". Collective."""
    kept = [g for g in groups if g.dropped is None]
    samples = [_masked_if_unscored(s) for g in kept for s in g.samples]
    group_ids = np.array([n for n, g in enumerate(kept) for _ in g.samples], dtype=np.int64)
    greedy = [g.greedy_reward for g in kept for _ in g.samples]
    order = np.random.default_rng(draw_seed(seed, "minibatches", step)).permutation(len(kept))
    rank = np.argsort(order)
    rows = sorted(range(len(samples)), key=lambda n: (rank[group_ids[n]], n))
    return [
        _sample_batch(
            [samples[n] for n in part], [greedy[n] for n in part], group_ids[part], policy, token_budget
        )
        for part in np.array_split(np.array(rows, dtype=np.int64), minibatches)
    ]


def draw_audit(
    batches: Sequence[Batch],
    policy: Policy,
    *,
    token_budget: int,
    responses: int,
    seed: int,
    step: int,
) -> Batch:
    """Draw up to `responses` of this replica's responses that are trained on, anew each step. Collective."""
    samples = [s for b in batches for s in b.samples if s.active_tokens]
    order = np.random.default_rng(draw_seed(seed, "audit", step)).permutation(len(samples))
    chosen = [samples[n] for n in order[:responses]]
    return _sample_batch(chosen, [None] * len(chosen), np.arange(len(chosen)), policy, token_budget)


def pack_sequences(sequences: Sequence[TokenSequence], policy: Policy, token_budget: int) -> Batch:
    """Pack sequences to learn from as they are into one mini-batch. Collective."""
    return Batch.of_sequences(_pack(sequences, policy, token_budget))


def _sample_batch(
    samples: Sequence[Sample],
    greedy: Sequence[float | None],
    group_ids: np.ndarray,
    policy: Policy,
    token_budget: int,
) -> Batch:
    logprobs = [torch.from_numpy(s.logprobs) for s in samples]
    return Batch(
        samples=tuple(samples),
        rewards=_or_nan([s.reward for s in samples]),
        greedy_rewards=_or_nan(greedy),
        group_ids=torch.from_numpy(group_ids),
        micro_batches=tuple(
            m.with_columns(engine_logprobs=scatter_response(m, samples, logprobs))
            for m in _pack(samples, policy, token_budget)
        ),
    )


def _pack(
    sequences: Sequence[Sample | TokenSequence], policy: Policy, token_budget: int
) -> tuple[MicroBatch, ...]:
    """Pack into as many micro-batches as every other replica makes at this call. Collective."""
    count = micro_batch_count(sequences, token_budget) if sequences else 0
    count = max(1, policy.groups.max_over_replicas(count))
    count = -(-count // policy.micro_batch_multiple) * policy.micro_batch_multiple
    return make_micro_batches(sequences, token_budget, count)


def _masked_if_unscored(sample: Sample) -> Sample:
    if sample.reward is not None:
        return sample
    return replace(sample, loss_mask=np.zeros(len(sample.response_ids), np.bool_))


def _or_nan(values: Sequence[float | None]) -> Tensor:
    """float32; NaN for None."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)
