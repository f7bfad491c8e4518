"""The figures printed with the formulas, to 1e-5."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms import (
    Recipe,
    finalize,
    get_recipe,
    make_recipe,
    policy_loss,
)
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.parts import find_part
from tests.algorithms.batches import advantages_of

FIRST = [1.0, -1, -1, 1, -1, -1, -1, 1]
SECOND = [1.0, -1, -1, 1, -1, 1, -1, 1]


def advantages(recipe: Recipe, rewards: list[float]) -> Tensor:
    """Of responses of one token."""
    count = len(rewards)
    one_each, group = torch.arange(count + 1), torch.zeros(count, dtype=torch.int64)
    mask = torch.ones(count, dtype=torch.bool)
    return advantages_of(recipe, torch.tensor(rewards), group, mask, one_each)["advantages"]


def token_losses(recipe: Recipe, ratios: list[float], advantages: list[float]) -> list[float]:
    """The loss of each token by itself, at log-probability -1."""
    out = []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        output = policy_loss(
            recipe,
            logprobs=torch.tensor([-1.0]),
            old_logprobs=torch.tensor([-1.0 - math.log(ratio)]),
            advantages=torch.tensor([advantage]),
            mask=torch.tensor([True]),
            cu_seqlens=torch.tensor([0, 1]),
            weights=torch.tensor([1.0]),
        )
        out.append(float(output.loss))
    return out


@pytest.mark.parametrize(
    ("name", "std", "rewards", "expected"),
    [
        ("grpo", "population", FIRST, [1.29099 if r > 0 else -0.77460 for r in FIRST]),
        ("grpo", "population", SECOND, SECOND),
        ("grpo", "bessel", SECOND, [0.935414 * r for r in SECOND]),
        ("dr_grpo", "none", SECOND, SECOND),
        ("rloo", "none", SECOND, [1.142857 * r for r in SECOND]),
        ("grpo", "bessel", [2.0, 1, 0.5, 0.5], [1.4142, 0, -0.70711, -0.70711]),
    ],
)
def test_advantages_of_the_printed_groups(
    name: str, std: str, rewards: list[float], expected: list[float]
) -> None:
    recipe = get_recipe(name, **({"std": std} if name == "grpo" else {}))
    torch.testing.assert_close(advantages(recipe, rewards), torch.tensor(expected), rtol=0, atol=2e-5)


def test_ppo_clip_keeps_the_smaller_objective() -> None:
    recipe = get_recipe("dr_grpo", weights="token_mean")
    losses = token_losses(recipe, [0.5, 1.0, 1.5], [1.0, -1.0, 2.0])
    assert losses == pytest.approx([-0.5, 1.0, -2.4], abs=1e-5)


def test_dual_clip_bounds_bad_actions_from_above() -> None:
    recipe = get_recipe("dapo", clip_high=0.2, dual_clip=3.0)
    losses = token_losses(recipe, [0.5, 1.0, 10.0], [1.0, -1.0, -4.0])
    assert losses == pytest.approx([-0.5, 1.0, 12.0], abs=1e-5)


def test_cispo_clamps_the_weight() -> None:
    recipe = get_recipe("cispo", clip_low=0.2, clip_high=0.28)
    losses = token_losses(recipe, [1.0, 1.14, 1.56, 0.4], [1.0, 1.0, 1.0, 1.0])
    assert losses == pytest.approx([1.0, 1.14, 1.28, 0.8], abs=1e-5)  # times -logp = 1


def test_cispo_by_default_only_caps_the_weight_at_five() -> None:
    losses = token_losses(get_recipe("cispo"), [1e-3, 4.9, 7.0], [1.0, 1.0, 1.0])
    assert losses == pytest.approx([1e-3, 4.9, 5.0], abs=1e-5)


def test_sapo_gate_is_two_over_tau_at_ratio_one_with_slope_one() -> None:
    losses = token_losses(get_recipe("sapo"), [1.0, 1.0, 2.0], [1.0, -1.0, 1.0])
    assert losses == pytest.approx([-2.0, 2 / 1.05, -4 / (1 + math.exp(-1))], abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 0.223144), ("k2", 0.024897), ("k3", 0.023144), ("k3+", 0.023144)],
)
def test_kl_estimates_of_one_half_against_four_tenths(kind: str, expected: float) -> None:
    value, _ = kl_estimate(
        find_part("kl", kind), torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.4)])
    )
    assert float(value) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("tis", [0.1, 0.6, 2.0, 2.0, 2.0]),
        ("mis", [0.0, 0.6, 2.0, 0.0, 0.0]),
        ("icepop", [0.0, 0.6, 2.0, 4.9, 0.0]),
    ],
)
def test_corrections_bound_trainer_over_engine_never_its_inverse(
    correction: str, expected: list[float]
) -> None:
    trainer_over_engine = [0.1, 0.6, 2.0 - 1e-6, 4.9, 5.1]
    recipe = make_recipe({"name": "dapo", "correction": correction})
    for weight, factor in zip(trainer_over_engine, expected, strict=True):
        output = policy_loss(
            recipe,
            logprobs=torch.tensor([-1.0]),
            old_logprobs=torch.tensor([-1.0]),
            engine_logprobs=torch.tensor([-1.0 - math.log(weight)]),
            advantages=torch.tensor([-1.0]),
            mask=torch.tensor([True]),
            cu_seqlens=torch.tensor([0, 1]),
            weights=torch.tensor([1.0]),
        )
        assert float(output.loss) == pytest.approx(factor, abs=1e-5)
        logged = finalize(output.metrics)
        assert logged["train/correction_masked"] == (1.0 if factor == 0 else 0.0)
        assert logged["train/correction_truncated"] == (1.0 if 0 < factor < weight - 1e-4 else 0.0)
