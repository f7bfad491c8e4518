"""What must not matter: how the batch is cut, ordered, padded and shared, and what masked positions hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import (
    RECIPES,
    Recipe,
    combine,
    finalize,
    get_recipe,
)
from tests.algorithms.batches import (
    PER_TOKEN,
    Ragged,
    assert_close,
    every_combination,
    few,
    identify,
    many,
    ragged,
    run,
    shuffled_parts,
    take,
    totals_of,
    with_masked,
)

seeds = st.integers(0, 10**6)


def assert_same_metrics(actual: dict[str, float], expected: dict[str, float], *, to: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(actual[name], value, rel_tol=to, abs_tol=to), (name, actual[name], value)


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
@few
@given(seeds)
def test_splitting_the_batch_in_any_way_changes_neither_loss_nor_gradient_nor_metrics(
    recipe: Recipe, seed: int
) -> None:
    batch = ragged(seed, drift=1e-3 if recipe.ratio != "token" else 0.3)
    whole, gradient = run(recipe, batch)
    totals = totals_of(batch)
    loss, metrics, pieces = 0.0, [], torch.zeros_like(gradient)
    for rows in shuffled_parts(len(batch.advantages), 3, seed):
        part, index = take(batch, rows)
        output, part_gradient = run(recipe, part, totals=totals.select(torch.tensor(rows, dtype=torch.int64)))
        loss += float(output.loss)
        metrics.append(output.metrics)
        pieces[index] = part_gradient
    assert math.isclose(loss, float(whole.loss), rel_tol=1e-6, abs_tol=1e-7)
    assert_close(pieces, gradient)
    assert_same_metrics(finalize(combine(metrics)), finalize(whole.metrics))


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
@pytest.mark.parametrize("new_groups", [True, False], ids=["as new groups", "in the same groups"])
def test_duplicating_the_whole_batch_changes_neither_loss_nor_gradient(
    recipe: Recipe, new_groups: bool
) -> None:
    batch = ragged(11, responses=12)
    rows = list(range(12))
    twice, _ = take(batch, rows + rows)
    if new_groups:
        shift = torch.tensor([0] * 12 + [10**6] * 12)
        twice = replace(twice, group_ids=twice.group_ids + shift)
    once, gradient = run(recipe, batch)
    output, double_gradient = run(recipe, twice)
    assert math.isclose(float(output.loss), float(once.loss), rel_tol=1e-6, abs_tol=1e-8)
    assert_close(double_gradient[: len(gradient)] + double_gradient[len(gradient) :], gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_masked_positions_contribute_exactly_nothing_whatever_they_hold(name: str, value: float) -> None:
    recipe = get_recipe(name, entropy_coef=0.01, off_policy_delta=0.05)
    batch = ragged(3, responses=12)
    assert 0 < int(batch.mask.sum()) < len(batch.mask)
    clean, clean_gradient = run(recipe, with_masked(batch, -1.0), weights=torch.where(batch.mask, 0.1, 0.0))
    dirty, dirty_gradient = run(
        recipe, with_masked(batch, value), weights=torch.where(batch.mask, 0.1, value)
    )
    assert float(clean.loss) == float(dirty.loss)
    assert torch.equal(clean_gradient, dirty_gradient)
    assert bool((dirty_gradient[~batch.mask] == 0).all())
    assert finalize(clean.metrics) == finalize(dirty.metrics)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_masked_advantages_contribute_exactly_nothing(value: float) -> None:
    batch = ragged(4, responses=12)
    per_token = batch.token_advantages
    clean, gradient = run(RECIPES["dapo"], batch)
    dirty, dirty_gradient = run(RECIPES["dapo"], batch, advantages=torch.where(batch.mask, per_token, value))
    assert torch.equal(gradient, dirty_gradient)
    assert finalize(clean.metrics) == finalize(dirty.metrics)


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
def test_padding_responses_with_masked_tokens_changes_nothing(recipe: Recipe) -> None:
    batch = ragged(5, responses=12)
    padded, where = pad_each(batch, 3)
    output, gradient = run(recipe, batch)
    output_padded, gradient_padded = run(recipe, padded)
    assert math.isclose(float(output.loss), float(output_padded.loss), rel_tol=1e-6, abs_tol=1e-9)
    assert_close(gradient_padded[where], gradient)


def pad_each(batch: Ragged, count: int) -> tuple[Ragged, Tensor]:
    """Every response with `count` masked tokens before it and after it; and where the old tokens went."""
    rows = torch.repeat_interleave(torch.arange(len(batch.advantages)), batch.cu_seqlens.diff())
    where = torch.arange(len(batch.mask)) + count * (2 * rows + 1)
    total = len(batch.mask) + 2 * count * len(batch.advantages)
    changed = {}
    for name in PER_TOKEN:
        old = getattr(batch, name)
        new = torch.zeros(total, dtype=old.dtype)
        new[where] = old
        changed[name] = new
    steps = torch.arange(len(batch.cu_seqlens), dtype=torch.int32)
    return replace(batch, **changed, cu_seqlens=batch.cu_seqlens + 2 * count * steps), where


@many
@given(seeds, st.permutations(range(4)))
def test_metrics_of_parts_combine_in_any_order_to_those_of_the_whole(seed: int, order: list[int]) -> None:
    batch = ragged(seed)
    parts = [take(batch, rows)[0] for rows in shuffled_parts(len(batch.advantages), 4, seed)]
    recipe, totals = RECIPES["ppo"], totals_of(batch)
    counts = totals.counts
    metrics = [run(recipe, p, totals=totals_of(p)._replace(counts=counts))[0].metrics for p in parts]
    whole = finalize(run(recipe, batch)[0].metrics)
    assert_same_metrics(finalize(combine([metrics[i] for i in order])), whole)
