"""Advantages that differ from token to token: GAE, and the KL taken from the reward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import RECIPES, finalize, get_recipe, value_loss
from megarl.algorithms.advantages import TokenRewards, gae
from tests.algorithms.batches import Ragged, advantages_of, assert_close, many, ragged

seeds = st.integers(0, 10**6)


def rewards_of(batch: Ragged) -> Tensor:
    return torch.where(batch.advantages > 1.0, math.nan, batch.advantages)


def literal_gae(
    batch: Ragged, values: Tensor, token_rewards: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Backwards, token by token."""
    advantages, returns = torch.zeros(2, len(values), dtype=torch.float64)
    for i, (begin, end) in enumerate(batch.spans):
        reward = float(rewards_of(batch)[i])
        if math.isnan(reward):
            continue
        following, running, first = 0.0, 0.0, True
        for t in reversed([t for t in range(begin, end) if batch.mask[t]]):
            now = float(token_rewards[t]) + (reward if first else 0.0)
            running = now + gamma * following - float(values[t]) + gamma * gae_lambda * running
            following, first = float(values[t]), False
            advantages[t], returns[t] = running, running + float(values[t])
    return advantages, returns


@many
@given(
    seeds, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.95, 1.0]), st.sampled_from([0.0, 0.3])
)
def test_gae_is_the_backward_recursion_over_active_tokens_whitened_at_last(
    seed: int, gamma: float, gae_lambda: float, beta: float
) -> None:
    """With a KL in the reward, which is taken token by token."""
    batch = ragged(seed)
    values = batch.entropy
    kl = {"kl": "k1", "kl_in": "reward", "kl_coef": beta} if beta else {}
    recipe = get_recipe("ppo", gamma=gamma, gae_lambda=gae_lambda, **kl)
    token_rewards = -beta * (batch.old_logprobs.double() - batch.ref_logprobs.double())
    expected, returns = literal_gae(batch, values, token_rewards, gamma, gae_lambda)
    scored = ~rewards_of(batch).repeat_interleave(batch.cu_seqlens.diff()).isnan()
    poison = torch.where(batch.mask, 0.0, math.nan)
    actual = advantages_of(
        recipe,
        rewards_of(batch),
        batch.group_ids,
        batch.mask,
        batch.cu_seqlens,
        values=values + poison,
        old_logprobs=batch.old_logprobs + poison,
        ref_logprobs=batch.ref_logprobs + poison,
    )
    assert_close(actual["advantages"], whitened(expected, batch.mask & scored), to=1e-5)
    assert_close(actual["returns"], returns)


def whitened(values: Tensor, counted: Tensor) -> Tensor:
    out, kept = torch.zeros_like(values), values[counted]
    if len(kept) > 1:
        out[counted] = (kept - kept.mean()) / (kept.std(correction=0) + 1e-6)
    return out


def test_gae_of_a_long_response_forgets_nothing() -> None:
    tokens = 5000
    reward, value = torch.zeros(2, tokens, dtype=torch.float64)
    reward[-1] = 1.0
    out = gae(TokenRewards(reward, value, torch.zeros(tokens, dtype=torch.int64)), gae_lambda=0.999)
    expected = 0.999 ** torch.arange(tokens - 1, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(out, expected)


@many
@given(seeds)
def test_reinforce_pp_takes_the_kl_to_go_from_the_reward_and_whitens_over_tokens(seed: int) -> None:
    batch, beta = ragged(seed), 0.3
    recipe = get_recipe("reinforce_pp", kl_coef=beta)
    raw = torch.zeros(len(batch.mask), dtype=torch.float64)
    counted = torch.zeros(len(batch.mask), dtype=torch.bool)
    for i, (begin, end) in enumerate(batch.spans):
        reward = float(rewards_of(batch)[i])
        active = [t for t in range(begin, end) if batch.mask[t] and not math.isnan(reward)]
        for t in active:
            k1 = [float(batch.old_logprobs[u]) - float(batch.ref_logprobs[u]) for u in active if u >= t]
            raw[t], counted[t] = reward - beta * sum(k1), True
    actual = advantages_of(
        recipe,
        rewards_of(batch),
        batch.group_ids,
        batch.mask,
        batch.cu_seqlens,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
    )
    assert_close(actual["advantages"], whitened(raw, counted), to=1e-5)


def test_a_group_advantage_takes_the_whole_kl_of_a_response_from_its_reward() -> None:
    recipe = get_recipe("rloo", kl="k1", kl_coef=0.5)
    out = advantages_of(
        recipe,
        torch.tensor([1.0, 1.0]),
        torch.tensor([0, 0]),
        torch.tensor([False, True, True, True]),
        torch.tensor([0, 3, 4]),
        old_logprobs=torch.tensor([math.nan, -1.0, -1.0, -1.0]),
        ref_logprobs=torch.tensor([math.nan, -2.0, -3.0, -1.0]),
    )
    # rewards 1 - 0.5 * 3 = -0.5 and 1
    torch.testing.assert_close(out["advantages"], torch.tensor([0.0, -1.5, -1.5, 1.5]))


def test_what_a_recipe_needs_is_asked_for() -> None:
    batch = ragged(1)
    for name, needed in (("ppo", "'values' is needed"), ("reinforce_pp", "'old_logprobs' is needed")):
        with pytest.raises(ValueError, match=needed):
            advantages_of(RECIPES[name], batch.advantages, batch.group_ids, batch.mask, batch.cu_seqlens)


@many
@given(seeds, st.sampled_from([None, 0.2]))
def test_value_loss_is_its_formula_and_ignores_masked_tokens(seed: int, clip: float | None) -> None:
    batch = ragged(seed)
    old, returns, weight = batch.entropy, batch.ref_logprobs, 0.05
    leaf = batch.logprobs.double().requires_grad_()
    expected = leaf.sum() * 0.0
    for t in batch.mask.nonzero().squeeze(1).tolist():
        target = float(returns[t])
        error = (leaf[t] - target) ** 2
        if clip is not None:
            inside = abs(float(leaf.detach()[t] - old[t].double())) <= clip
            bounded = leaf[t] if inside else old[t].double() + math.copysign(clip, leaf.detach()[t] - old[t])
            error = max(error, (bounded - target) ** 2, key=lambda x: float(x.detach()))
        expected = expected + 0.5 * weight * error
    expected.backward()

    values = torch.where(batch.mask, batch.logprobs, math.nan).requires_grad_()
    output = value_loss(
        values=values,
        old_values=torch.where(batch.mask, old, math.inf),
        returns=torch.where(batch.mask, returns, math.nan),
        mask=batch.mask,
        weights=torch.where(batch.mask, weight, math.nan),
        value_clip=clip,
    )
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-9)
    assert_close(values.grad, leaf.grad)
    assert all(math.isfinite(x) for x in finalize(output.metrics).values())


def test_a_value_that_stays_within_its_clip_is_never_counted_as_clipped() -> None:
    """Though old + (new - old) is not new to the last bit."""
    old, values = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) / 10
    for moved, share in ((0.0, 0.0), (0.4, 1.0)):
        _, metrics = value_loss(
            values=values + moved,
            old_values=old,
            returns=values + moved,
            mask=torch.ones(1000, dtype=torch.bool),
            weights=torch.full((1000,), 1e-3),
            value_clip=0.2,
        )
        assert finalize(metrics)["critic/value_clip_fraction"] == pytest.approx(share)
