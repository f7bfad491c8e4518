"""A job of whole updates, whose mini-batches are the same in every layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.algorithms import resolve_sources
from megarl.algorithms.recipes import make_recipe
from megarl.data.packing import make_micro_batches, response_positions
from megarl.megatron.critic import Critic
from megarl.megatron.policy import Policy
from megarl.megatron.reference import ReferencePolicy
from megarl.megatron.settings import OptimizerSettings
from megarl.records import Batch, Group, WeightSpan
from megarl.routing.store import RouteStore
from megarl.training.minibatches import draw_audit, make_minibatches
from megarl.training.scoring import audit, store_metrics, with_engine_routes
from megarl.training.stages.stage import AuxiliaryModels
from megarl.training.update import PolicyUpdate
from megarl.weights.exchange import iter_hf_tensors
from tests.megatron.jobs import BUDGET, build, join, make_samples

RECIPES: dict[str, dict[str, Any]] = {
    "critic, KL in the reward, recorded routes": {
        "name": "ppo",
        "clip_low": 0.05,
        "clip_high": 0.05,
        "kl": "k1",
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
    },
    "engine log-probabilities, KL in the reward": {"name": "gspo", "kl": "k1", "kl_coef": 0.1},
    "the engine's routes, correction": {
        "name": "minirl",
        "routing_replay": "engine",
        "correction_high": 1.05,
    },
    "greedy baselines, KL in the loss": {
        "name": "remax",
        "kl": "k3",
        "kl_coef": 0.1,
        "correction": "sequence_mis",
        "routing_replay": "off",
    },
}


def make_groups(vocabulary: int, engine: dict[str, np.ndarray] | None = None) -> list[Group]:
    """Six groups of three; one response unscored, one fully masked, one of a single token, one group without a greedy
    score. engine: the engine's log-probabilities by sample."""
    samples = make_samples(18, vocabulary)
    one = samples[7]
    samples[4] = replace(samples[4], reward=None)
    samples[7] = replace(
        one,
        response_ids=one.response_ids[:1],
        logprobs=one.logprobs[:1],
        loss_mask=np.ones(1, bool),
        spans=(WeightSpan(0, 0, 1),),
    )
    if engine is not None:
        samples = [replace(s, logprobs=engine[s.sample_id]) for s in samples]
    return [
        Group(s.prompt, tuple(samples[n : n + 3]), greedy_reward=None if n == 6 else n / 18)
        for n, s in enumerate(samples)
        if n % 3 == 0
    ]


def engine_job(checkpoint: Path) -> dict[str, np.ndarray]:
    """The policy's log-probabilities of every response and some noise, so that some ratios are clipped."""
    policy, _ = build(checkpoint, {})
    samples = [s for g in make_groups(policy.architecture.vocab_size) for s in g.samples]
    open_ = [replace(s, loss_mask=np.ones(len(s.response_ids), bool)) for s in samples]
    (micro_batch,) = make_micro_batches(open_, 10_000)
    ((logprobs, _),) = policy.compute_logprobs([micro_batch], temperature=0.8)
    rng = np.random.default_rng(1)
    answered = [open_[row] for row in micro_batch.rows.tolist()]
    found = logprobs[response_positions(micro_batch, open_)].split([len(s.response_ids) for s in answered])
    return {
        sample.sample_id: values.numpy() + rng.normal(0, 0.1, len(values)).astype(np.float32)
        for sample, values in zip(answered, found, strict=True)
    }


def make_batches(groups: Sequence[Group], policy: Policy) -> list[Batch]:
    """Every layout's mini-batches hold the same groups; the last one nothing of a second replica's."""
    place, count = policy.groups.replica_index, policy.groups.replica_count
    numbers = ((0, 1, 2), (3, 5), (4,))
    batches = []
    for n, chosen in enumerate(numbers):
        mine = [groups[g] for g in chosen][place::count]
        (batch,) = make_minibatches(mine, 1, policy, token_budget=BUDGET, seed=0, step=0)
        batches.append(replace(batch, group_ids=batch.group_ids + 10 * n))
    return batches


def engine_routes(batches: Sequence[Batch], policy: Policy) -> RouteStore:
    """Random experts; some rows are stale."""
    architecture, replay = policy.architecture, policy.replay
    assert replay is not None
    columns = [architecture.moe_layers.index(n) for chunk in replay.layers for n in chunk]
    store = RouteStore()
    for sample in (s for b in batches for s in b.samples):
        rng = np.random.default_rng(zlib.crc32(sample.sample_id.encode()))
        scores = rng.random((sample.tokens - 1, len(architecture.moe_layers), architecture.num_experts))
        experts = scores.argsort(-1)[..., : architecture.top_k].astype(np.uint8)
        store.add(sample.sample_id, experts[:, columns], rng.random(len(experts)) < 0.1)
    return store


def updates_job(
    checkpoint: Path, layout: dict[str, Any], engine: dict[str, np.ndarray], **options: Any
) -> dict[str, Any]:
    """By recipe, the metrics of two updates of three mini-batches each, the second after the reference became the
    policy, and the weights after them."""
    ranks, results = join(layout), {}
    for name, words in RECIPES.items():
        policy, name_map = build(checkpoint, layout, ranks, **options)
        recipe = make_recipe(words)
        sources = resolve_sources(recipe, moe=True, minibatches=3)
        # Adam's steps are nearly proportional to the gradient, not its sign: rounding stays rounding
        optimizer = OptimizerSettings(lr=3e-3, eps=1e-3)
        policy.set_optimizer(optimizer)
        models = AuxiliaryModels()
        if "ref_logprobs" in recipe.needs:
            models.reference = ReferencePolicy(policy)
        if "values" in recipe.needs:
            models.critic = Critic(policy)
            models.critic.set_optimizer(optimizer)
        update = PolicyUpdate(policy, recipe, sources, models, temperature=0.8, max_new_tokens=64)
        groups, metrics = make_groups(policy.architecture.vocab_size, engine), []
        for _ in range(2):
            batches = make_batches(groups, policy)
            drawn = draw_audit(batches, policy, token_budget=BUDGET, responses=99, seed=0, step=0)
            found = audit(drawn, policy, 0.8)
            if sources.routing_replay != "recorded":
                store = engine_routes(batches, policy)
                batches = with_engine_routes(batches, store, policy)
                found |= store_metrics(store, policy)
            metrics.append(update.learn(update.score(batches)) | found)
            del metrics[-1]["train/micro_batches"]
            if models.reference is not None:
                models.reference.replace()
        results[name] = {"metrics": metrics, "weights": {k: t.clone() for k, t in iter_hf_tensors(name_map)}}
    return results
