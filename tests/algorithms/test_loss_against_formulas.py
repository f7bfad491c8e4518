"""The loss and its gradient are the papers' formulas, as an independent float64 loop computes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import RECIPES, Recipe, get_recipe, make_recipe, policy_loss
from tests.algorithms import literal
from tests.algorithms.batches import (
    MAX_LENGTH,
    assert_close,
    every_combination,
    few,
    identify,
    many,
    ragged,
    run,
    weights_of,
)

seeds = st.integers(0, 10**6)


def assert_follows_the_formula(recipe: Recipe, seed: int) -> None:
    # GSPO's bounds lie some 1e-4 around 1, the others' some 1e-1
    batch = ragged(seed, drift=1e-3 if recipe.ratio != "token" else 0.3)
    weights = literal.weight(recipe.weights, batch, MAX_LENGTH)
    leaf = batch.logprobs.double().requires_grad_()
    expected = literal.loss(recipe, batch, weights, leaf)
    expected.backward()
    output, gradient = run(recipe, batch)
    scale = sum(abs(w) for w in weights)
    assert abs(float(output.loss) - float(expected)) <= 1e-6 * max(scale, abs(float(expected)))
    assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
@few
@given(seeds)
def test_every_recipe_and_weight_mode_is_its_formula(recipe: Recipe, seed: int) -> None:
    assert_follows_the_formula(recipe, seed)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+"])
@few
@given(seeds)
def test_every_kl_in_the_loss_is_its_formula(kind: str, seed: int) -> None:
    assert_follows_the_formula(get_recipe("grpo", kl=kind, kl_coef=0.3), seed)


@pytest.mark.parametrize(
    "correction", ["tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis"]
)
@many
@given(seeds)
def test_every_correction_is_its_formula(correction: str, seed: int) -> None:
    bounds = {"correction_low": 0.8, "correction_high": 1.3} if correction == "geometric_mis" else {}
    assert_follows_the_formula(get_recipe("dapo", correction=correction, **bounds), seed)


@many
@given(seeds)
def test_entropy_bonus_and_off_policy_mask_are_their_formulas(seed: int) -> None:
    assert_follows_the_formula(get_recipe("grpo", entropy_coef=0.1, off_policy_delta=0.05), seed)


@few
@given(seeds)
def test_composed_recipes_are_their_formulas(seed: int) -> None:
    cispo_on_sequences = make_recipe(
        {
            "name": "mine",
            "advantage": "rloo",
            "ratio": "sequence",
            "surrogate": "cispo",
            "weights": "sequence_mean",
            "clip_low": 2e-4,
            "clip_high": 2e-4,
            "correction": "icepop",
            "kl": "k3+",
            "old_logprobs": "recompute",
        }
    )
    assert_follows_the_formula(cispo_on_sequences, seed)


@pytest.mark.parametrize("mode", ["token_mean", "group_token_mean", "sequence_mean", "constant"])
@many
@given(seeds)
def test_token_weights_are_counted_as_the_table_says(mode: str, seed: int) -> None:
    batch = ragged(seed)
    assert_close(
        weights_of(mode, batch), torch.tensor(literal.weight(mode, batch, MAX_LENGTH), dtype=torch.float64)
    )


@many
@given(seeds)
def test_gspo_equals_gspo_token_for_one_advantage_per_response(seed: int) -> None:
    batch = ragged(seed, drift=1e-3)
    (whole, gradient), (token, token_gradient) = (run(RECIPES[n], batch) for n in ("gspo", "gspo_token"))
    assert float(whole.loss) == float(token.loss)
    assert torch.equal(gradient, token_gradient)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_does_not_weigh_a_response_by_its_length(name: str) -> None:
    """Two responses with one ratio and one advantage move the policy by the same amount, however long."""
    lengths = [1, 40]
    batch = ragged(0, responses=2)
    tokens = sum(lengths)
    changes = {
        "logprobs": torch.full((tokens,), -1.0).requires_grad_(),
        "old_logprobs": torch.full((tokens,), -1.0001),
        "mask": torch.ones(tokens, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 1, tokens]),
    }
    weights = weights_of("sequence_mean", replace(batch, **changes))
    output = policy_loss(RECIPES[name], **changes, advantages=torch.ones(tokens), weights=weights)
    output.loss.backward()
    gradient = changes["logprobs"].grad
    torch.testing.assert_close(gradient[:1].sum(), gradient[1:].sum())


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "dr_grpo", "rloo", "remax", "opo", "cispo", "minirl", "sapo"]
)
@few
@given(seeds)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name: str, seed: int) -> None:
    recipe = get_recipe(name, kl="none", correction="none")
    batch = ragged(seed, drift=0.0)
    _, gradient = run(recipe, batch)
    weights = torch.tensor(literal.weight(recipe.weights, batch, MAX_LENGTH), dtype=torch.float64)
    assert_close(gradient, -weights * batch.token_advantages)
