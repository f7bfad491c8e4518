"""Advantages of whole responses: by group id, exact where it matters, the same on several replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import RECIPES, advantage_metrics, assign_advantages, finalize, get_recipe
from megarl.algorithms.advantages import whiten
from tests.algorithms.batches import (
    AllReduce,
    advantages_of,
    alone,
    filler,
    make_batch,
    many,
    on_ranks,
    pack,
)

WITHOUT_CRITIC = sorted(name for name, recipe in RECIPES.items() if "values" not in recipe.needs)
BY_GROUP = sorted(n for n in WITHOUT_CRITIC if RECIPES[n].advantage not in ("remax", "reinforce_pp"))

groups_of_rewards = st.lists(
    st.tuples(st.integers(-2, 2), st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, math.nan]), st.integers(0, 9)),
    max_size=20,
)


def advantages(
    name: str,
    rewards: Tensor,
    groups: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    **given_: Any,
) -> Tensor:
    """[tokens]: of responses of these lengths, one token unless given; without a KL."""
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else groups
    lengths = torch.ones(len(rewards), dtype=torch.int64) if lengths is None else lengths
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    greedy_rewards = torch.zeros_like(rewards) if greedy_rewards is None else greedy_rewards
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    recipe = get_recipe(name, kl="none")
    return advantages_of(recipe, rewards, groups, mask, cu_seqlens, greedy_rewards=greedy_rewards, **given_)[
        "advantages"
    ]


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
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )
    expected = torch.tensor(literal(name, rewards, groups, lengths)).repeat_interleave(
        torch.tensor(lengths).long()
    )
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize("reward", [0.1, -1.0 / 3.0, 1e8, 1e-30])
def test_a_group_of_exactly_equal_rewards_has_advantage_exactly_zero(name: str, reward: float) -> None:
    rewards = torch.tensor([reward] * 8 + [0.0, 1.0], dtype=torch.float32)
    groups = torch.tensor([3] * 8 + [4] * 2)
    lengths = torch.arange(1, 11)
    of_equal, others = advantages(name, rewards, groups, lengths=lengths).split([36, 19])
    assert (of_equal == 0).all()
    assert (others != 0).all()


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


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_a_group_may_lie_in_several_mini_batches_and_fillers_count_nowhere(name: str) -> None:
    """Its statistics are of the whole rollout, in which its id is its own."""
    g = torch.Generator().manual_seed(0)
    rewards, greedy, groups = torch.randn(6, generator=g), torch.randn(6, generator=g), torch.arange(6) // 3
    lengths = torch.tensor([2, 1, 3, 1, 2, 2])
    whole = advantages(name, rewards, groups, lengths=lengths, greedy_rewards=greedy).split(lengths.tolist())

    def of(*rows: int, begin: int) -> Any:
        """A micro-batch of these responses, of the mini-batch that starts at `begin`."""
        cu_seqlens = torch.tensor([0, *lengths[list(rows)].cumsum(0).tolist()])
        mask = torch.ones(int(cu_seqlens[-1]), dtype=torch.bool)
        return pack(mask, cu_seqlens, rows=[row - begin for row in rows])

    batches = [
        make_batch(
            rewards[:4], groups[:4], of(3, 0, begin=0), filler(), of(2, 1, begin=0), greedy_rewards=greedy[:4]
        ),
        make_batch(rewards[4:], groups[4:], filler(), of(5, 4, begin=4), greedy_rewards=greedy[4:]),
    ]
    out = assign_advantages(batches, get_recipe(name, kl="none"), alone)
    found = [[m.columns["advantages"] for m in b.micro_batches] for b in out]
    for actual, rows in ((found[0][0], (3, 0)), (found[0][2], (2, 1)), (found[1][1], (5, 4))):
        torch.testing.assert_close(actual, torch.cat([whole[row] for row in rows]))
    assert found[0][1].tolist() == found[1][0].tolist() == [0.0]


def test_a_replica_without_responses_takes_part_in_whitening() -> None:
    sums: list[Tensor] = []

    def reduce_sum(x: Tensor) -> Tensor:
        sums.append(x)
        return x

    nobody = make_batch(torch.empty(0), torch.empty(0, dtype=torch.int64), filler())
    (out,) = assign_advantages([nobody], get_recipe("reinforce_pp", kl="none"), reduce_sum)
    assert out.micro_batches[0].columns["advantages"].tolist() == [0.0]
    assert [x.sum().item() for x in sums] == [0.0, 0.0]


def test_whitened_values_have_mean_zero_and_spread_one_over_all_micro_batches() -> None:
    g = torch.Generator().manual_seed(0)
    values, counts = torch.randn(50, generator=g) * 3 + 7, torch.randint(0, 5, (50,), generator=g)
    white = torch.cat(whiten(values.split(20), counts.split(20)))
    mean = (counts * white).sum() / counts.sum()
    spread = (counts * (white - mean) ** 2).sum() / counts.sum()
    assert float(mean) == pytest.approx(0, abs=1e-9)
    assert float(spread) == pytest.approx(1, abs=1e-5)


def test_groups_without_spread_are_counted_among_those_of_two_or_more() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.0, 1.0, 5.0, math.nan, math.nan, 2.0, 2.0])
    groups = torch.tensor([1, 1, 2, 2, 3, 3, 4, 5, 5])
    logged = finalize(advantage_metrics(rewards=rewards, group_ids=groups))
    assert logged["train/zero_variance_groups"] == pytest.approx(2 / 3)
    assert logged["train/groups_of_one"] == pytest.approx(1)
    assert logged["train/unscored_responses"] == 2


def test_an_infinite_reward_is_named() -> None:
    with pytest.raises(ValueError, match="infinite reward at response 1"):
        advantages("grpo", torch.tensor([0.0, math.inf]))
    with pytest.raises(ValueError, match="infinite reward at response 1"):
        advantages("remax", torch.zeros(2), greedy_rewards=torch.tensor([0.0, -math.inf]))
