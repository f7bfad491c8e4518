"""Advantages and token weights as columns of a rollout's micro-batches: what the trainer calls.

    batches = assign_advantages(batches, recipe, reduce_sum)        # the whole rollout, every mini-batch of it
    batch = add_token_weights(batch, recipe, max_length=..., reduce_sum=reduce_sum)      # one mini-batch

The rest of this room are functions of tensors, which these two call on records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages import Rewards, TokenRewards, is_last, whiten
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses, SumReduce, clean
from megarl.algorithms.weights import local_totals, token_weights
from megarl.records import Batch, MicroBatch


class _Packed(NamedTuple):
    """A micro-batch with what its tokens' advantages are made of.

    rows: int64 [sequences], in the rollout. penalty: float32 [tokens], the KL in the reward, negated and
    weighted; 0 where there is none.
    """

    micro_batch: MicroBatch
    rows: Tensor
    responses: Responses
    penalty: Tensor

    def spread(self, per_response: Tensor) -> Tensor:
        """float64 [tokens]: a value for each response of the rollout, at the active tokens of those here."""
        values = self.responses.spread(per_response[self.rows], torch.float64)
        return torch.where(self.micro_batch.mask, values, 0.0)


def assign_advantages(batches: Sequence[Batch], recipe: Recipe, reduce_sum: SumReduce) -> list[Batch]:
    """Return a rollout's mini-batches with their columns "advantages" and, with a critic, "returns".

    batches: everything that this replica learns from until it samples again; group ids are unique among them.
    Their micro-batches have the columns "old_logprobs", "ref_logprobs", "values" where `recipe.needs` says so.
    reduce_sum: sums a small float64 vector over data-parallel replicas. Where the recipe whitens, every
    replica calls it twice, also one without responses.

    advantages, returns: float32 [tokens], 0 where masked. A response without a reward (NaN; with greedy
    baselines also where that is NaN) is left out of its group's statistics and has advantage 0. returns are
    what the critic should say: the advantage before whitening, plus the value. Raises ValueError for a missing
    or misshapen column and for an infinite reward.
    """
    packed = _pack(batches, recipe)
    rewards = _rewards(batches, recipe, packed)
    part = recipe.parts["advantage"]
    per_response = None if part.per_token else recipe.use("advantage")(rewards)
    counted = [p.spread(rewards.scored) > 0 for p in packed]
    raw = [_raw(recipe, rewards, per_response, p, active) for p, active in zip(packed, counted, strict=True)]
    final = whiten(raw, counted, reduce_sum) if part.whitened else raw
    learns = torch.where(rewards.flat(), 0.0, rewards.scored) if part.compares_group else rewards.scored
    completed = []
    for p, advantages, before, active in zip(packed, final, raw, counted, strict=True):
        columns = {"advantages": torch.where(p.spread(learns) > 0, advantages, 0.0).float()}
        if "values" in part.needs:
            values = _column(recipe, p.micro_batch, "values")
            columns["returns"] = torch.where(active, before + values, 0.0).float()
        completed.append(p.micro_batch.with_columns(**columns))
    rest = iter(completed)
    return [b.with_micro_batches(islice(rest, len(b.micro_batches))) for b in batches]


def _raw(
    recipe: Recipe, rewards: Rewards, per_response: Tensor | None, packed: _Packed, counted: Tensor
) -> Tensor:
    """float64 [tokens]: a micro-batch's advantages before whitening, 0 where not counted."""
    part = recipe.parts["advantage"]
    if per_response is not None:
        raw = torch.where(counted, packed.spread(per_response), 0.0)
        if not (part.kl_to_go and recipe.has_reward_kl):
            return raw
    else:
        raw = torch.zeros(len(counted), dtype=torch.float64)
    index = counted.nonzero().squeeze(1)
    rows = packed.responses.rows[index]
    penalty = packed.penalty[index].double()
    reward = torch.where(is_last(rows), packed.spread(rewards.reward)[index], 0.0) + penalty
    value = torch.zeros_like(reward)
    if "values" in part.needs:
        value = _column(recipe, packed.micro_batch, "values")[index].double()
    tokens = TokenRewards(reward, value, rows)
    raw[index] += recipe.use("advantage")(tokens) if part.per_token else tokens.sum_to_go(penalty)
    return raw


def add_token_weights(
    batch: Batch, mode: str | Recipe, *, max_length: int | None = None, reduce_sum: SumReduce
) -> Batch:
    """Return one optimizer step's data with the column "weights", and with its `active_tokens` counted.

    mode: as in `token_weights`. max_length: the generation budget in tokens, for `constant`. reduce_sum: sums
    int64 [3] over data-parallel replicas. weights: float32 [tokens], 0 where masked. Where `active_tokens` is 0
    there is nothing to learn from anywhere.
    """
    packed = [(m, _responses(m)) for m in batch.micro_batches]
    lengths = torch.zeros_like(batch.group_ids)
    for micro_batch, responses in packed:
        lengths[micro_batch.rows] = responses.active.long()
    totals = local_totals(lengths=lengths, group_ids=batch.group_ids, max_length=max_length)
    totals = totals._replace(counts=reduce_sum(totals.counts))
    weighted = tuple(m.with_columns(weights=token_weights(mode, r, totals.select(m.rows))) for m, r in packed)
    return replace(batch, micro_batches=weighted, active_tokens=int(totals.tokens))


def _pack(batches: Sequence[Batch], recipe: Recipe) -> list[_Packed]:
    starts = accumulate((len(b.group_ids) for b in batches), initial=0)
    return [
        _Packed(m, m.rows + start, _responses(m), _penalty(recipe, m))
        for b, start in zip(batches, starts, strict=False)
        for m in b.micro_batches
    ]


def _responses(micro_batch: MicroBatch) -> Responses:
    """Return the responses of a micro-batch: none of a filler, in which attention sees a sequence."""
    return Responses.of(micro_batch.mask, micro_batch.cu_seqlens[: len(micro_batch.rows) + 1])


def _penalty(recipe: Recipe, micro_batch: MicroBatch) -> Tensor:
    if not recipe.has_reward_kl:
        return torch.zeros(micro_batch.tokens)
    old, reference = (_column(recipe, micro_batch, name) for name in ("old_logprobs", "ref_logprobs"))
    return -recipe.kl_coef * kl_estimate(recipe.use("kl"), old, reference).value.detach()


def _rewards(batches: Sequence[Batch], recipe: Recipe, packed: Sequence[_Packed]) -> Rewards:
    """Return the rollout's rewards; a KL in the reward is taken from them unless it comes token by token."""
    part = recipe.parts["advantage"]
    nothing = torch.empty(0)
    rewards = torch.cat([nothing, *(b.rewards for b in batches)])
    greedy = torch.cat([nothing, *(b.greedy_rewards for b in batches)])
    lengths, penalties = torch.zeros(2, len(rewards), dtype=torch.float64)
    for p in packed:
        lengths[p.rows], penalties[p.rows] = p.responses.active, p.responses.sum(p.penalty)
    by_token = part.per_token or part.kl_to_go
    return Rewards.of(
        rewards if by_token else rewards + penalties,
        torch.cat([nothing.long(), *(b.group_ids for b in batches)]),
        lengths=lengths,
        greedy_rewards=greedy if "greedy_rewards" in recipe.needs else None,
    )


def _column(recipe: Recipe, micro_batch: MicroBatch, name: str) -> Tensor:
    if name not in micro_batch.columns:
        raise ValueError(f"{recipe.name}: the column {name!r} is needed by its advantages")
    return clean(micro_batch.mask, micro_batch.columns[name], name)
