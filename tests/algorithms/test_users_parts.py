"""Parts of a user's own, from a module outside the package: used as megarl's are, and refused with one message."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.algorithms import (
    RECIPES,
    Recipe,
    add_token_weights,
    get_recipe,
    make_recipe,
    policy_loss,
    render_algorithms,
)
from megarl.algorithms.parts import SLOTS
from megarl.errors import UserError
from tests.algorithms.batches import advantages_of, alone, assert_close, make_batch, pack, ragged, run

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
SOFT_CLIP = PAGE.split("# my_package/losses.py\n")[1].split("```")[0]  # the page's example

MODULE = """
import torch

from megarl.algorithms import Correction, KLEstimate, TokenLosses, part


@part("advantage", formula="A_i = scale (R_i - min_group)", meaning="nobody is punished", compares_group=True)
def above_worst(rewards, *, scale: float = 1.0):
    worst = torch.full_like(rewards.reward, torch.inf).scatter_reduce(0, rewards.group, rewards.reward, "amin")
    return scale * (rewards.reward - worst[rewards.group])


@part("advantage", formula="A_t = sum_k decay^k R_{t+k}", meaning="a reward fades", per_token=True)
def fading(tokens, *, decay: float):
    return tokens.sum_to_go(tokens.reward, decay)


@part("ratio", formula="r_t = 1", meaning="no ratio", one_advantage=True)
def one(log_ratios):
    return (log_ratios.tokens - log_ratios.tokens.detach()).exp()


@part("weights", formula="w_t = share / (active tokens)", meaning="a share of the mean")
def some(totals, *, share: float = 0.5):
    return totals.tokens / share


@part("kl", formula="kl_t = |k1_t|", meaning="its size", refused={"kl_in": {"reward": "it is for the loss"}})
def size(log_ratio):
    return KLEstimate(log_ratio.abs())


@part("correction", formula="c_t = 1/2", meaning="trusts nobody")
def half(mismatch):
    never = torch.zeros_like(mismatch.log_weight, dtype=torch.bool)
    return Correction(torch.full_like(mismatch.log_weight, 0.5), never, never)


@part("surrogate", formula="l_t = 0", meaning="has a setting of another part", needs=())
def clashing(tokens, *, std: float = 1.0):
    return TokenLosses(tokens.ratio)


def plain(tokens):
    return TokenLosses(tokens.ratio)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_losses.py").write_text(SOFT_CLIP + MODULE)
    (tmp_path / "broken_losses.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "odd_losses.py").write_text(
        "from megarl.algorithms import part\n"
        "@part('surrogate', formula='', meaning='')\n"
        "def two(tokens, other): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("my_losses", "broken_losses", "odd_losses"):
        sys.modules.pop(name, None)


def soft(**changes: object) -> Recipe:
    return make_recipe({"name": "dr_grpo", "surrogate": "my_losses:soft_clip", **changes})


@pytest.mark.usefixtures("mine")
def test_a_users_surrogate_is_trained_with_and_its_setting_is_read() -> None:
    batch = ragged(4, responses=12)
    for softness in (2.0, 0.5):
        recipe = soft(softness=softness)
        assert recipe.softness == softness
        output, gradient = run(recipe, batch, weights=torch.where(batch.mask, 0.1, 0.0))
        leaf = batch.logprobs.double().requires_grad_()
        ratio = (leaf - batch.old_logprobs).exp()
        losses = -batch.token_advantages * (softness * (ratio - 1)).tanh() / softness
        expected = (0.1 * losses)[batch.mask].sum()
        expected.backward()
        assert float(output.loss) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert_close(gradient, leaf.grad)
    assert soft().softness == 2.0
    assert soft(softness="5e-1").softness == 0.5  # a string to YAML 1.1


@pytest.mark.usefixtures("mine")
def test_a_users_advantage_is_taken_over_groups_and_its_flat_groups_are_zero() -> None:
    recipe = get_recipe("dapo", advantage="my_losses:above_worst", scale=3.0)
    rewards, groups = torch.tensor([1.0, 3.0, math.nan, 5.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    mask = torch.ones(5, dtype=torch.bool)
    found = advantages_of(recipe, rewards, groups, mask, torch.arange(6))
    assert found["advantages"].tolist() == [3.0, 9.0, 0.0, 0.0, 0.0]  # the unscored one has reward 0
    assert recipe.compares_group


@pytest.mark.usefixtures("mine")
def test_a_users_advantage_may_differ_from_token_to_token() -> None:
    recipe = get_recipe("dapo", advantage="my_losses:fading", decay=0.5)
    mask = torch.tensor([False, True, True, True, True])
    found = advantages_of(
        recipe, torch.tensor([8.0, 1.0]), torch.zeros(2).long(), mask, torch.tensor([0, 4, 5])
    )
    assert found["advantages"].tolist() == [0.0, 2.0, 4.0, 8.0, 1.0]
    with pytest.raises(UserError, match="one advantage per response"):
        get_recipe("dapo", advantage="my_losses:fading", decay=0.5, ratio="my_losses:one")


@pytest.mark.usefixtures("mine")
def test_every_slot_takes_a_users_part() -> None:
    batch = ragged(4, responses=12)
    recipe = make_recipe(
        {
            "name": "mine",
            "advantage": "my_losses:above_worst",
            "ratio": "my_losses:one",
            "surrogate": "my_losses:soft_clip",
            "weights": "my_losses:some",
            "kl": "my_losses:size",
            "kl_coef": 0.1,
            "correction": "my_losses:half",
            "share": 0.25,
        }
    )
    assert all(":" in getattr(recipe, slot) for slot in SLOTS)
    assert recipe.needs == {"ref_logprobs", "engine_logprobs"}
    micro_batch = pack(batch.mask, batch.cu_seqlens)
    rollout = make_batch(batch.advantages, batch.group_ids, micro_batch)
    weighted = add_token_weights(rollout, recipe, reduce_sum=alone)
    weights = weighted.micro_batches[0].columns["weights"]
    assert_close(weights, torch.where(batch.mask, 0.25 / weighted.active_tokens, 0.0))
    _, gradient = run(recipe, batch, weights=weights)
    # the ratio is 1, so the surrogate's gradient is -A; the correction halves it
    expected = -0.5 * batch.token_advantages + 0.1 * (batch.logprobs - batch.ref_logprobs).sign()
    assert_close(gradient, weights * expected)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(ValueError, match="pass the recipe"):
        add_token_weights(rollout, recipe.weights, reduce_sum=alone)


@pytest.mark.usefixtures("mine")
def test_a_users_part_is_shown() -> None:
    shown = render_algorithms("my_losses:soft_clip")
    assert "surrogate soft_clip: saturates smoothly" in shown
    assert "l_t = -A tanh(softness (r_t - 1)) / softness" in shown
    assert "softness: how early it saturates (a number above 0, 2 unless given)" in shown


@pytest.mark.usefixtures("mine")
def test_a_loss_with_a_users_surrogate_compiles_to_one_graph() -> None:
    batch, recipe = ragged(4, responses=12), soft()
    torch._dynamo.reset()

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            recipe,
            logprobs=logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.token_advantages,
            mask=batch.mask,
            cu_seqlens=batch.cu_seqlens,
            weights=torch.full_like(logprobs, 0.1),
            engine_logprobs=batch.engine_logprobs,
        ).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(batch.logprobs)
    torch.testing.assert_close(compiled, loss(batch.logprobs))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"softness": 0.0}, "algorithm 'dr_grpo': softness is 0.0, it must be above 0"),
        ({"softness": "hard"}, "softness is 'hard', it must be a number"),
        ({"softnes": 1.0}, "unknown field 'softnes'. Did you mean 'softness'"),
        (
            {"clip_low": 0.1},
            "clip_low = 0.1 has no effect with surrogate 'my_losses:soft_clip' (only with clip,",
        ),
        ({"surrogate": "clip", "softness": 1.0}, "unknown field 'softness'"),
        ({"surrogate": "my_losses:soft_clp"}, "has no part 'soft_clp'. Did you mean 'soft_clip'"),
        ({"surrogate": "my_losses:plain"}, "'my_losses:plain' is no part: declare the function with @megarl"),
        ({"surrogate": "my_losses:math"}, "has no part 'math'"),
        ({"surrogate": "my_losses:above_worst"}, "is declared for the slot 'advantage': name it there"),
        ({"surrogate": "my_loses:soft_clip"}, "cannot import 'my_loses' (ModuleNotFoundError"),
        ({"surrogate": "broken_losses:x"}, "cannot import 'broken_losses' (ModuleNotFoundError"),
        ({"surrogate": "odd_losses:two"}, "a part's function takes one argument, and settings by keyword"),
        ({"surrogate": "my_losses.soft_clip"}, "named by its import path, package.module:name"),
        ({"advantage": "my_losses:fading"}, "advantage 'fading' needs the setting 'decay'"),
        ({"kl": "my_losses:size", "kl_in": "reward"}, "it is for the loss"),
        (
            {"advantage": "grpo", "surrogate": "my_losses:clashing"},
            "surrogate 'clashing' has a setting 'std', and so has advantage 'grpo': rename it",
        ),
    ],
)
def test_what_is_wrong_with_a_users_part_is_one_message(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        soft(**changes)
    assert says in str(refusal.value)


@pytest.mark.parametrize("slot", SLOTS)
def test_a_parts_file_says_its_slot_and_holds_all_of_it(slot: str) -> None:
    """Adding a part is one declaration there."""
    text = (Path(__file__).parents[2] / f"{SLOTS[slot].module.replace('.', '/')}.py").read_text()
    assert text.startswith(f'"""The slot `{slot}`')
    used = {getattr(recipe, slot) for recipe in RECIPES.values()} - {"none"}
    assert all(f"def {name}(" in text for name in used)
