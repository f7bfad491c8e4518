"""Learning from one rollout: passes over it, advantages, the policy loss, optimizer steps; a critic beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import (
    Recipe,
    add_token_weights,
    advantage_metrics,
    assign_advantages,
    average_steps,
    combine,
    finalize,
    mismatch_metrics,
    policy_loss,
    reduce_metrics,
    value_loss,
)
from megarl.algorithms.metrics import Metrics, PartialMetric
from megarl.algorithms.recipe import Sources
from megarl.data.packing import make_micro_batches, micro_batch_count, scatter_response
from megarl.megatron.critic import Critic
from megarl.megatron.policy import LossFunction, Policy, StepResult
from megarl.megatron.reference import ReferencePolicy
from megarl.records import Batch, Group, MicroBatch, Sample
from megarl.rollout.sampling import draw_seed
from megarl.routing.agreement import RoutingCounts, routing_metrics
from megarl.routing.replay import LayerRoutes, Routes
from megarl.routing.store import RouteStore

AUDITED = ("audit/abs_diff_mean", "audit/abs_diff_max", "audit/k3", "audit/ratio_outside", "audit/tokens")

# [mini-batch][micro-batch]: one vector each
Vectors = list[list[Tensor]]


@dataclass(frozen=True)
class UpdateSettings:
    """recipe, and where its old log-probabilities come from; minibatches: optimizer steps per rollout;
    temperature: of sampling; max_new_tokens: the generation budget; micro_batch_tokens: packing."""

    recipe: Recipe
    sources: Sources
    minibatches: int
    temperature: float
    max_new_tokens: int
    micro_batch_tokens: int


@dataclass(frozen=True)
class _Passes:
    """What was computed over the rollout before its first optimizer step; None where nothing needs it.

    routes: recorded by the old pass, [mini-batch][micro-batch].
    """

    old: Vectors | None
    reference: Vectors | None
    values: Vectors | None
    routes: list[list[LayerRoutes]] | None


def split(
    groups: Sequence[Group], settings: UpdateSettings, policy: Policy, *, seed: int, step: int
) -> list[Batch]:
    """The kept groups' responses as mini-batches of whole groups where they suffice, in an order of this step's own;
    every replica gets equally many micro-batches in each. Unscored responses are masked."""
    kept = [g for g in groups if g.dropped is None]
    samples = [_masked_if_unscored(s) for g in kept for s in g.samples]
    group_ids = np.array([n for n, g in enumerate(kept) for _ in g.samples], dtype=np.int64)
    greedy = [g.greedy_reward for g in kept for _ in g.samples]
    order = np.random.default_rng(draw_seed(seed, "minibatches", step)).permutation(len(kept))
    place = np.argsort(order)
    rows = sorted(range(len(samples)), key=lambda n: (place[group_ids[n]], n))
    return [
        _batch([samples[n] for n in part], [greedy[n] for n in part], group_ids[part], settings, policy)
        for part in np.array_split(np.array(rows, dtype=np.int64), settings.minibatches)
    ]


def draw_audit(
    batches: Sequence[Batch],
    settings: UpdateSettings,
    policy: Policy,
    *,
    responses: int,
    seed: int,
    step: int,
) -> Batch:
    """Up to `responses` of this replica's responses that are trained on, drawn anew each step."""
    samples = [s for b in batches for s in b.samples if s.active_tokens]
    order = np.random.default_rng(draw_seed(seed, "audit", step)).permutation(len(samples))
    chosen = [samples[n] for n in order[:responses]]
    return _batch(chosen, [None] * len(chosen), np.arange(len(chosen)), settings, policy)


def _batch(
    samples: Sequence[Sample],
    greedy: Sequence[float | None],
    group_ids: np.ndarray,
    settings: UpdateSettings,
    policy: Policy,
) -> Batch:
    """Packed into as many micro-batches as every other replica makes at this call. Collective."""
    count = micro_batch_count(samples, settings.micro_batch_tokens) if samples else 0
    count = max(1, policy.groups.max_over_replicas(count))
    count = -(-count // policy.micro_batch_multiple) * policy.micro_batch_multiple
    return Batch(
        samples=tuple(samples),
        rewards=_tensor([s.reward for s in samples]),
        greedy_rewards=_tensor(greedy),
        group_ids=torch.from_numpy(group_ids),
        micro_batches=make_micro_batches(samples, settings.micro_batch_tokens, count),
    )


def _masked_if_unscored(sample: Sample) -> Sample:
    if sample.reward is not None:
        return sample
    return replace(sample, loss_mask=np.zeros(len(sample.response_ids), np.bool_))


def _tensor(values: Sequence[float | None]) -> Tensor:
    """float32; NaN for None."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)


def engine_logprobs(batch: Batch) -> list[Tensor]:
    """The engine's log-probabilities by input position, [tokens] for each micro-batch."""
    values = [torch.from_numpy(s.logprobs) for s in batch.samples]
    return [scatter_response(m, batch.samples, values) for m in batch.micro_batches]


class Updater:
    """Runs the optimizer steps of one rollout.

    reference, critic: for recipes that need them.
    """

    def __init__(
        self,
        policy: Policy,
        settings: UpdateSettings,
        *,
        reference: ReferencePolicy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.reference = reference
        self.critic = critic

    def update(self, batches: Sequence[Batch], store: RouteStore | None = None) -> dict[str, float]:
        """One optimizer step for each mini-batch, in order. Returns metrics, the same on every rank.

        store: the engine's routes of these responses, to replay or, if the sources don't say so, to compare with.
        Collective. A mini-batch without an active token anywhere takes no optimizer step and is counted.
        """
        passes = self._passes(batches, store)
        batches = self._with_advantages(batches, passes)
        parts: list[Metrics] = []
        results: list[StepResult] = []
        counts: list[RoutingCounts] = []
        has_routes = store is not None or passes.routes is not None
        forced = self.settings.sources.routing_replay != "off"
        weighted = [
            add_token_weights(
                batch,
                self.settings.recipe,
                max_length=self.settings.max_new_tokens,
                reduce_sum=self.policy.groups.sum_over_replicas,
            )
            for batch in batches
        ]
        learned_from = [n for n, (_, totals) in enumerate(weighted) if int(totals.tokens)]
        skipped = len(batches) - len(learned_from)
        for number in learned_from:
            batch, _ = weighted[number]
            counted = has_routes and number in (learned_from[0], learned_from[-1])
            first = number == learned_from[0]
            loss = self._loss(number, batch, passes, compare=first)
            result = self.policy.step(
                batch.micro_batches,
                loss,
                temperature=self.settings.temperature,
                routes=self._routes(number, batch, passes, store) if forced or counted else None,
                force_routes=forced,
                count_routes=counted,
            )
            if counted:
                counts.append(self.policy.routing_counts())
            parts.append(self._shared(result))
            if self.critic is not None and passes.values is not None:
                value_step = self._value_loss(batch)
                parts[-1] |= self._shared(self.critic.step(batch.micro_batches, value_step))
            results.append(result)
            skipped += not result.stepped
        if parts:
            parts[0] |= advantage_metrics(
                rewards=torch.cat([b.rewards for b in batches]),
                group_ids=torch.cat([b.group_ids for b in batches]),
            )
        metrics = self._reduce(parts)
        metrics |= {
            "train/optimizer_steps": float(sum(r.stepped for r in results)),
            "train/skipped_steps": float(skipped),
            "train/micro_batches": float(
                sum(len(b.micro_batches) for b in batches) * self.policy.groups.replica_count
            ),
        }
        if counts:
            metrics |= routing_metrics(counts[0], counts[-1])
        if store is not None:
            metrics |= self._store_metrics(store)
        if results:
            norms = [r.grad_norm for r in results]
            metrics |= {"train/grad_norm": float(np.mean(norms)), "train/lr": results[-1].lr}
        return metrics

    def audit(self, batch: Batch) -> dict[str, float]:
        """How far the engine's log-probabilities are from a forward pass of the trainer of its own, with live routing
        even where routes are replayed. Before the rollout's first optimizer step. Collective."""
        device, parts = self.policy.platform.device, []  # where metrics are summed over ranks
        scored = zip(self._logprobs([batch])[0], engine_logprobs(batch), batch.micro_batches, strict=True)
        for logprobs, engine, micro_batch in scored:
            vectors = (logprobs, engine, micro_batch.mask, micro_batch.cu_seqlens)
            found = mismatch_metrics(*(vector.to(device) for vector in vectors))
            parts.append({name: found[f"mismatch/{name.removeprefix('audit/')}"] for name in AUDITED})
        return self._reduce([combine(parts)])

    # -- before the first step ------------------------------------------------------------------------------------

    def _passes(self, batches: Sequence[Batch], store: RouteStore | None) -> _Passes:
        recipe, source = self.settings.recipe, self.settings.sources.old_logprobs
        old = reference = values = routes = None
        if source == "engine":
            old = [engine_logprobs(batch) for batch in batches]
        elif self.settings.sources.routing_replay == "recorded":
            assert self.policy.replay is not None
            with self.policy.replay.recording() as recorded:
                old = self._logprobs(batches)
            rest = iter(recorded)
            routes = [[next(rest) for _ in b.micro_batches] for b in batches]
        elif source == "recompute" or recipe.has_reward_kl:
            replayed = self.settings.sources.routing_replay == "engine"
            old = self._logprobs(batches, store if replayed else None)
        if "ref_logprobs" in recipe.needs:
            assert self.reference is not None, f"{recipe.name} needs a reference policy"
            with self.reference.in_place():
                reference = self._logprobs(batches)
        if "values" in recipe.needs:
            assert self.critic is not None, f"{recipe.name} needs a critic"
            values = _by_batch(batches, self.critic.values(_all_micro_batches(batches)))
        return _Passes(old, reference, values, routes)

    def _logprobs(self, batches: Sequence[Batch], store: RouteStore | None = None) -> Vectors:
        everything = _all_micro_batches(batches)
        passes = self.policy.logprobs(
            everything,
            temperature=self.settings.temperature,
            routes=None if store is None else self._stored_routes(batches, store),
        )
        return _by_batch(batches, [logprobs for logprobs, _ in passes])

    def _with_advantages(self, batches: Sequence[Batch], passes: _Passes) -> list[Batch]:
        """The mini-batches with what the passes computed and their advantages as columns."""
        found = {"old_logprobs": passes.old, "ref_logprobs": passes.reference, "values": passes.values}
        with_passes = []
        for n, batch in enumerate(batches):
            columns = [
                {name: vectors[n][k] for name, vectors in found.items() if vectors is not None}
                for k in range(len(batch.micro_batches))
            ]
            added = [m.with_columns(**c) for m, c in zip(batch.micro_batches, columns, strict=True)]
            with_passes.append(replace(batch, micro_batches=tuple(added)))
        return assign_advantages(with_passes, self.settings.recipe, self.policy.groups.sum_over_replicas)

    def _routes(self, number: int, batch: Batch, passes: _Passes, store: RouteStore | None) -> Routes | None:
        """Of a mini-batch: recorded ones, the engine's, or None."""
        if passes.routes is not None:
            return passes.routes[number].__getitem__
        return None if store is None else self._stored_routes([batch], store)

    def _stored_routes(self, batches: Sequence[Batch], store: RouteStore) -> Routes:
        places = [(b, m) for b in batches for m in b.micro_batches]
        assert self.policy.replay is not None
        shape = (sum(map(len, self.policy.replay.layers)), self.policy.architecture.top_k)

        def packed(number: int) -> Tensor:
            batch, micro_batch = places[number]
            return store.packed(micro_batch, batch.samples, shape).to(self.policy.platform.device)

        return self.policy.local_routes([m for _, m in places], packed)

    def _store_metrics(self, store: RouteStore) -> dict[str, float]:
        """bytes: of all layers, whichever ranks hold them; a replica's ranks of one stage hold the same."""
        groups, layout = self.policy.groups, self.policy.layout
        sums = torch.tensor(
            [store.bytes, store.tokens, store.stale], dtype=torch.float64, device=groups.device
        )
        torch.distributed.all_reduce(sums)
        copies = layout.tensor * layout.context
        size, tokens, stale = (sums / copies).tolist()
        tokens, stale = tokens / layout.pipeline, stale / layout.pipeline
        return {"routing/bytes_per_token": size / max(tokens, 1), "routing/stale_tokens": stale}

    # -- one step -------------------------------------------------------------------------------------------------

    def _loss(
        self,
        number: int,
        batch: Batch,
        passes: _Passes,
        *,
        compare: bool,
    ) -> LossFunction:
        """compare: with the engine, which before the first step holds the trainer's weights."""
        recipe, engine = self.settings.recipe, engine_logprobs(batch)
        device = self.policy.platform.device
        current = self.settings.sources.old_logprobs == "current"
        old = None if current or passes.old is None else passes.old[number]
        reference = None if passes.reference is None else passes.reference[number]

        def loss(n: int, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Metrics]:
            micro_batch = batch.micro_batches[n]
            mask, cu_seqlens = micro_batch.mask.to(device), micro_batch.cu_seqlens.to(device)
            engine_here = engine[n].to(device)
            output = policy_loss(
                recipe,
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old[n].to(device),
                advantages=micro_batch.columns["advantages"].to(device),
                mask=mask,
                cu_seqlens=cu_seqlens,
                weights=micro_batch.columns["weights"].to(device),
                engine_logprobs=engine_here,
                ref_logprobs=None if reference is None else reference[n].to(device),
                entropy=entropies if recipe.entropy_coef else entropies.detach(),
            )
            metrics = output.metrics
            if compare:
                metrics = metrics | mismatch_metrics(logprobs.detach(), engine_here, mask, cu_seqlens)
            return output.loss, metrics

        return loss

    def _value_loss(self, batch: Batch) -> LossFunction:
        device = self.policy.platform.device

        def loss(n: int, values: Tensor) -> tuple[Tensor, Metrics]:
            micro_batch = batch.micro_batches[n]
            return value_loss(
                values=values,
                old_values=micro_batch.columns["values"].to(device),
                returns=micro_batch.columns["returns"].to(device),
                mask=micro_batch.mask.to(device),
                weights=micro_batch.columns["weights"].to(device),
                value_clip=self.settings.recipe.value_clip,
            )

        return loss

    def _shared(self, result: StepResult) -> Metrics:
        """A step's metrics, on every stage, on the CPU: a tensor arrives where the sender had it, and its GPU is not
        ours."""
        own = {
            name: PartialMetric(metric.kind, metric.value.cpu())
            for name, metric in combine(result.collected).items()
        }
        return self.policy.groups.share_from_last_stage(own)

    def _reduce(self, parts: Sequence[Metrics]) -> dict[str, float]:
        """One set of numbers for the rollout: means weighted over mini-batches, losses a step on average."""
        if not parts:
            return {}
        groups = self.policy.groups
        merged = average_steps(parts)

        def reduced(vector: Tensor, op: Any) -> Tensor:
            vector = vector.to(groups.device)
            torch.distributed.all_reduce(vector, op=op, group=groups.peers_group)
            return vector

        return finalize(
            reduce_metrics(
                merged,
                sum_ranks=lambda v: reduced(v, torch.distributed.ReduceOp.SUM),
                max_ranks=lambda v: reduced(v, torch.distributed.ReduceOp.MAX),
            )
        )


def _all_micro_batches(batches: Sequence[Batch]) -> list[MicroBatch]:
    return [m for b in batches for m in b.micro_batches]


def _by_batch(batches: Sequence[Batch], vectors: Sequence[Tensor]) -> Vectors:
    values = iter(vectors)
    return [[next(values) for _ in b.micro_batches] for b in batches]
