"""What is logged is what happened: metrics by counting, and the arithmetic that adds them up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import (
    RECIPES,
    average_steps,
    combine,
    finalize,
    get_recipe,
    mismatch_metrics,
)
from megarl.algorithms import metrics as m
from megarl.algorithms.metrics import PartialMetric
from tests.algorithms.batches import MAX_LENGTH, Ragged, many, ragged, run
from tests.algorithms.literal import weight

seeds = st.integers(0, 10**6)


def weighted(values: dict[int, float], weights: list[float]) -> float:
    return sum(weights[t] * x for t, x in values.items()) / sum(weights[t] for t in values)


def active_of(batch: Ragged) -> list[int]:
    return batch.mask.nonzero().squeeze(1).tolist()


def row_of(batch: Ragged) -> list[int]:
    return [i for i, (b, e) in enumerate(batch.spans) for _ in range(b, e)]


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "gspo"])
@many
@given(seeds)
def test_clip_fractions_count_tokens_and_responses_by_side_and_sign(name: str, seed: int) -> None:
    recipe = RECIPES[name]
    batch = ragged(seed, drift=1.0 if recipe.ratio == "token" else 1e-3)
    tokens, row = active_of(batch), row_of(batch)
    logged = finalize(run(recipe, batch)[0].metrics)
    if not tokens:
        return
    weights = weight(recipe.weights, batch, MAX_LENGTH)
    side: dict[int, str] = {}
    for t in tokens:
        logs = {
            u: float(batch.logprobs[u].double() - batch.old_logprobs[u]) for u in tokens if row[u] == row[t]
        }
        ratio = math.exp(logs[t] if recipe.ratio == "token" else sum(logs.values()) / len(logs))
        a = float(batch.advantages[row[t]])
        side[t] = (
            "high" if a > 0 and ratio > 1 + recipe.clip_high
            else "low" if a < 0 and ratio < 1 - recipe.clip_low
            else "dual" if a < 0 and recipe.dual_clip and ratio > recipe.dual_clip
            else ""
        )  # fmt: skip
    positive = [t for t in tokens if batch.advantages[row[t]] > 0]
    sets = {"": (tokens, ("low", "high", "dual")), "_positive": (positive, ("low", "high", "dual"))}
    sets |= {"_negative": ([t for t in tokens if t not in positive], ("low", "high", "dual"))}
    sets |= {f"_{s}": (tokens, (s,)) for s in ("low", "high")}
    for suffix, (among, which) in sets.items():
        if not among:
            assert f"train/clip_fraction{suffix}" not in logged
            continue
        share = weighted({t: float(side[t] in which) for t in among}, weights)
        assert logged[f"train/clip_fraction{suffix}"] == pytest.approx(share, abs=1e-6)
        responses = {row[t] for t in among}
        hit = {row[t] for t in among if side[t] in which}
        assert logged[f"train/seq_clip_fraction{suffix}"] == pytest.approx(
            len(hit) / len(responses), abs=1e-6
        )


@many
@given(seeds)
def test_ratio_kl_and_entropy_metrics_are_means_under_the_token_weights(seed: int) -> None:
    recipe = get_recipe("grpo", correction="tis")
    batch = ragged(seed)
    tokens, row = active_of(batch), row_of(batch)
    logged = finalize(run(recipe, batch)[0].metrics)
    if not tokens:
        return
    weights = weight(recipe.weights, batch, MAX_LENGTH)
    log = {t: float(batch.logprobs[t].double() - batch.old_logprobs[t]) for t in tokens}
    factor = {t: min(math.exp(float(batch.old_logprobs[t] - batch.engine_logprobs[t])), 2.0) for t in tokens}
    k1_ref = {t: float(batch.logprobs[t].double() - batch.ref_logprobs[t]) for t in tokens}
    importance = {t: math.exp(log[t]) * factor[t] for t in tokens}
    means = [
        sum(log[t] for t in tokens if row[t] == i) / sum(row[t] == i for t in tokens)
        for i in sorted({row[t] for t in tokens})
    ]
    a = {t: float(batch.advantages[row[t]]) for t in tokens}
    total = sum(weights)
    mean_a = weighted(a, weights)
    expected = {
        "train/ratio_mean": weighted({t: math.exp(x) for t, x in log.items()}, weights),
        "train/ratio_max": math.exp(max(log.values())),
        "train/ratio_min": math.exp(min(log.values())),
        "train/seq_ratio_mean": sum(map(math.exp, means)) / len(means),
        "train/seq_ratio_max": math.exp(max(means)),
        "train/seq_ratio_min": math.exp(min(means)),
        "train/kl_old_k1": weighted({t: -x for t, x in log.items()}, weights),
        "train/kl_old_k3": weighted({t: math.exp(x) - 1 - x for t, x in log.items()}, weights),
        "train/kl": weighted({t: math.exp(-x) - 1 + x for t, x in k1_ref.items()}, weights),
        "train/entropy": weighted({t: float(batch.entropy[t]) for t in tokens}, weights),
        "train/correction_mean": weighted(factor, weights),
        "train/correction_truncated": weighted({t: float(x == 2.0) for t, x in factor.items()}, weights),
        "train/ess": sum(weights[t] * x for t, x in importance.items()) ** 2
        / (total * sum(weights[t] * x * x for t, x in importance.items())),
        "train/advantage_mean": mean_a,
        "train/advantage_std": math.sqrt(weighted({t: (x - mean_a) ** 2 for t, x in a.items()}, weights)),
        "train/advantage_max": max(a.values()),
        "train/active_tokens": len(tokens),
        "train/active_responses": len(means),
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert logged["train/loss"] == pytest.approx(
        logged["train/pg_loss"] + logged["train/kl_loss"], rel=1e-5, abs=1e-6
    )


@many
@given(st.lists(st.tuples(st.floats(-18, 18), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=40))
def test_quantiles_come_back_from_the_histogram_to_two_percent_of_the_logarithm(
    rows: list[tuple[float, float]],
) -> None:
    values, weights = (torch.tensor(x) for x in zip(*rows, strict=True))
    logged = finalize({"x": m.quantiles_of(values, weights)})
    order = sorted(rows)
    for suffix, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        total, below = sum(w for _, w in rows), 0.0
        for value, w in order:  # noqa: B007
            below += w
            if below >= share * total - 1e-9:
                break
        assert math.log(logged[f"x_{suffix}"]) == pytest.approx(value, rel=0.02, abs=2e-7)


def test_the_median_of_equal_policies_is_exactly_one() -> None:
    batch = ragged(4, responses=12)
    logged = finalize(run(RECIPES["gspo"], replace(batch, logprobs=batch.old_logprobs))[0].metrics)
    assert logged["train/seq_ratio_p50"] == logged["train/ratio_p50"] == 1.0
    assert logged["train/ess"] == pytest.approx(1.0)


@many
@given(seeds)
def test_mismatch_metrics_weigh_every_token_alike_and_ignore_masked_ones(seed: int) -> None:
    batch = ragged(seed, drift=0.5)
    poison = torch.where(batch.mask, 0.0, math.nan)
    logged = finalize(
        mismatch_metrics(batch.logprobs + poison, batch.old_logprobs - poison, batch.mask, batch.cu_seqlens)
    )
    tokens, row = active_of(batch), row_of(batch)
    assert logged["mismatch/tokens"] == len(tokens)
    if not tokens:
        return
    x = {t: float(batch.logprobs[t].double() - batch.old_logprobs[t]) for t in tokens}
    means = [
        sum(x[t] for t in tokens if row[t] == i) / sum(row[t] == i for t in tokens)
        for i in {row[t] for t in tokens}
    ]
    expected = {
        "mismatch/abs_diff_mean": sum(map(abs, x.values())) / len(x),
        "mismatch/abs_diff_max": max(map(abs, x.values())),
        "mismatch/k1": -sum(x.values()) / len(x),
        "mismatch/k3": sum(math.exp(v) - 1 - v for v in x.values()) / len(x),
        "mismatch/ratio_outside": sum(not 0.5 <= math.exp(v) <= 2 for v in x.values()) / len(x),
        "mismatch/seq_ratio_max": math.exp(max(means)),
        "mismatch/seq_ratio_min": math.exp(min(means)),
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_mean_over_parts_is_weighted_by_their_counts() -> None:
    few, many_ = torch.tensor([10.0]), torch.tensor([1.0] * 9)
    parts = [{"x": m.mean_of(v, torch.ones_like(v))} for v in (few, many_)]
    assert finalize(combine(parts)) == {"x": pytest.approx(1.9)}


def test_losses_of_several_optimizer_steps_are_averaged_and_their_tokens_added_up() -> None:
    steps = [{"loss": m.loss_of(torch.tensor(x)), "tokens": m.sum_of(torch.ones(2))} for x in (1.0, 2.0)]
    assert finalize(average_steps(steps)) == {"loss": 1.5, "tokens": 4.0}
    assert finalize(combine(steps)) == {"loss": 3.0, "tokens": 4.0}


def test_a_largest_value_that_is_not_a_number_is_logged_as_such() -> None:
    values = torch.tensor([1.0, math.nan])
    assert math.isnan(finalize({"x": m.largest_of(values, values != 1.0)})["x"])


def test_names_that_only_some_micro_batches_have_are_kept() -> None:
    one = {"a": PartialMetric("sum", torch.tensor([1.0], dtype=torch.float64))}
    other = {"b": PartialMetric("max", torch.tensor([2.0], dtype=torch.float64))}
    assert finalize(combine([one, other, one])) == {"a": 2.0, "b": 2.0}
    assert finalize(combine([])) == {}
