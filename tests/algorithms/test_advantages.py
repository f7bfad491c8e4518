"""Advantages of whole responses: by group id, exact where it matters, the same on several replicas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import (
    RECIPES,
    advantage_metrics,
    compute_advantages,
    finalize,
    get_recipe,
    whiten,
)
from tests.algorithms.batches import AllReduce, many, on_ranks

WITHOUT_CRITIC = sorted(name for name, recipe in RECIPES.items() if not recipe.needs_critic)
BY_GROUP = sorted(n for n in WITHOUT_CRITIC if RECIPES[n].advantage not in ("remax", "reinforce_pp"))

groups_of_rewards = st.lists(
    st.tuples(st.integers(-2, 2), st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, math.nan]), st.integers(0, 9)),
    max_size=20,
)


def advantages(name: str, rewards: Tensor, groups: Tensor | None = None, **given_: object) -> Tensor:
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else groups
    arguments = {"lengths": torch.ones(len(rewards)), "greedy_rewards": torch.zeros(len(rewards))} | given_
    return compute_advantages(get_recipe(name), rewards=rewards, group_ids=groups, **arguments)  # type: ignore[arg-type]


def literal(name: str, rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    """Advantages one response at a time, in Python floats."""
    kind = RECIPES[name].advantage
    scored = [not math.isnan(r) for r in rewards]
    raw, flat = [0.0] * len(rewards), [False] * len(rewards)
    for i, reward in enumerate(rewards):
        peers = [j for j in range(len(rewards)) if groups[j] == groups[i] and scored[j]]
        values = [rewards[j] for j in peers]
        flat[i] = len(set(values)) <= 1 and kind != "reinforce_pp"
        if not scored[i]:
            continue
        mean = math.fsum(values) / len(values)
        if kind == "reinforce_pp":
            raw[i] = reward
        elif flat[i]:
            raw[i] = 0.0
        elif kind in ("dr_grpo", "reinforce_pp_baseline"):
            raw[i] = reward - mean
        elif kind == "grpo":
            raw[i] = (reward - mean) / (math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) + 1e-6)
        elif kind == "rloo":
            raw[i] = reward - (sum(values) - reward) / (len(values) - 1)
        elif kind == "opo":
            total = sum(lengths[j] for j in peers)
            raw[i] = reward - sum(lengths[j] * rewards[j] for j in peers) / max(total, 1)
    if not kind.startswith("reinforce_pp"):
        return raw
    tokens = [raw[i] for i in range(len(raw)) if scored[i] for _ in range(lengths[i])]
    if len(set(tokens)) <= 1:
        return [0.0] * len(raw)
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / len(tokens))
    return [
        (x - mean) / (std + 1e-6) if s and not f else 0.0 for x, s, f in zip(raw, scored, flat, strict=True)
    ]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline"])
@many
@given(groups_of_rewards)
def test_advantages_are_the_formula_over_groups_of_any_size(
    name: str, rows: list[tuple[int, float, int]]
) -> None:
    groups, rewards, lengths = ([row[k] for row in rows] for k in range(3))
    actual = advantages(
        name,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        greedy_rewards=None,
    )
    expected = torch.tensor(literal(name, rewards, groups, lengths), dtype=torch.float64)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize("reward", [0.1, -1.0 / 3.0, 1e8, 1e-30])
def test_a_group_of_exactly_equal_rewards_has_advantage_exactly_zero(name: str, reward: float) -> None:
    rewards = torch.tensor([reward] * 8 + [0.0, 1.0], dtype=torch.float32)
    groups = torch.tensor([3] * 8 + [4] * 2)
    actual = advantages(name, rewards, groups, lengths=torch.arange(1, 11))
    assert (actual[:8] == 0).all()
    assert (actual[8:] != 0).all()


@pytest.mark.parametrize("name", BY_GROUP)
def test_a_group_of_one_has_advantage_zero_and_is_counted(name: str) -> None:
    rewards, groups = torch.tensor([5.0, 0.0, 1.0]), torch.tensor([1, 2, 2])
    assert advantages(name, rewards, groups)[0] == 0
    logged = finalize(advantage_metrics(rewards=rewards, group_ids=groups))
    assert logged["train/groups_of_one"] == 1
    assert logged["train/zero_variance_groups"] == 0


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_an_unscored_response_is_left_out_of_its_group_and_has_advantage_zero(name: str) -> None:
    rewards = torch.tensor([0.0, math.nan, 1.0, 3.0])
    kept = torch.tensor([0, 2, 3])
    actual = advantages(name, rewards)
    assert actual[1] == 0
    torch.testing.assert_close(actual[kept], advantages(name, rewards[kept]))


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_there_may_be_no_responses_at_all_or_no_scored_ones(name: str) -> None:
    assert advantages(name, torch.empty(0)).shape == (0,)
    assert (advantages(name, torch.full((3,), math.nan)) == 0).all()


@pytest.mark.parametrize("name", BY_GROUP)
def test_rewards_of_a_hundred_million_lose_no_digits(name: str) -> None:
    small = torch.tensor([0.0, 8, 16, 8], dtype=torch.float64)
    near = advantages(name, small)
    far = advantages(name, (small + 1e8).float())
    torch.testing.assert_close(far, near, rtol=1e-6, atol=0)


def test_group_ids_may_be_any_numbers_in_any_order() -> None:
    rewards = torch.tensor([0.0, 1, 1, 0, 3])
    one = advantages("grpo", rewards, torch.tensor([0, 1, 0, 1, 0]))
    other = advantages("grpo", rewards, torch.tensor([-5, 10**12, -5, 10**12, -5]))
    assert torch.equal(one, other)


def test_remax_subtracts_the_greedy_reward_also_in_a_group_of_one() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 2.0])
    greedy = torch.tensor([0.5, 1.0, 1.0, math.nan])
    actual = advantages("remax", rewards, torch.arange(4), greedy_rewards=greedy)
    assert actual.tolist() == [0.5, 0.0, -1.0, 0.0]


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_over_two_replicas_is_whitening_over_all(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    rewards, lengths = torch.randn(12, generator=g) + 1e4, torch.randint(0, 9, (12,), generator=g)
    groups = torch.arange(12) // 3
    whole = advantages(name, rewards, groups, lengths=lengths)

    def job(rank: int, all_reduce: AllReduce) -> Tensor:
        mine = slice(0, 3) if rank == 0 else slice(3, 12)
        return advantages(name, rewards[mine], groups[mine], lengths=lengths[mine], reduce_sum=all_reduce)

    torch.testing.assert_close(torch.cat(on_ranks(2, job)), whole, rtol=1e-6, atol=1e-7)


def test_whitened_values_have_mean_zero_and_spread_one() -> None:
    g = torch.Generator().manual_seed(0)
    values, weights = torch.randn(50, generator=g) * 3 + 7, torch.randint(0, 5, (50,), generator=g)
    white = whiten(values, weights)
    mean = (weights * white).sum() / weights.sum()
    spread = (weights * (white - mean) ** 2).sum() / weights.sum()
    assert float(mean) == pytest.approx(0, abs=1e-9)
    assert float(spread) == pytest.approx(1, abs=1e-5)


def test_groups_without_spread_are_counted_among_those_of_two_or_more() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.0, 1.0, 5.0, math.nan, math.nan, 2.0, 2.0])
    groups = torch.tensor([1, 1, 2, 2, 3, 3, 4, 5, 5])
    logged = finalize(advantage_metrics(rewards=rewards, group_ids=groups))
    assert logged["train/zero_variance_groups"] == pytest.approx(2 / 3)
    assert logged["train/groups_of_one"] == pytest.approx(1)
    assert logged["train/unscored_responses"] == 2


def test_what_is_missing_or_impossible_is_named() -> None:
    rewards = torch.tensor([0.0, math.inf])
    with pytest.raises(ValueError, match="infinite reward at response 1"):
        advantages("grpo", rewards)
    with pytest.raises(ValueError, match="lengths are needed by advantage 'opo'"):
        advantages("opo", torch.zeros(2), lengths=None)
    with pytest.raises(ValueError, match="greedy_rewards are needed by advantage 'remax'"):
        advantages("remax", torch.zeros(2), greedy_rewards=None)
    with pytest.raises(ValueError, match="lengths has shape"):
        advantages("opo", torch.zeros(2), lengths=torch.ones(3))
    with pytest.raises(ValueError, match="needs a critic"):
        advantages("ppo", torch.zeros(2))
