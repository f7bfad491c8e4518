"""The table of recipes and how a user changes, composes and reads it; every refusal says why."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.algorithms import (
    RECIPES,
    get_recipe,
    make_recipe,
    render_algorithms,
    resolve_sources,
)
from megarl.algorithms.describe import formula, part_table, recipe_table
from megarl.algorithms.parts import SLOTS, builtin_parts
from megarl.algorithms.recipe import COMMON, RULES
from megarl.errors import UserError

PARTS_OF_MINE = {"advantage": "rloo", "ratio": "sequence", "surrogate": "clip", "weights": "sequence_mean"}


def test_the_table_holds_the_promised_recipes() -> None:
    promised = (
        "ppo grpo dapo dr_grpo cispo cispo_mask gspo gspo_token reinforce_pp reinforce_pp_baseline rloo "
        "remax opo sapo gmpo minirl"
    )
    assert list(RECIPES) == promised.split()
    assert all(name == recipe.name for name, recipe in RECIPES.items())


def test_defaults_are_the_papers() -> None:
    gspo, dapo, grpo, cispo = (RECIPES[n] for n in ("gspo", "dapo", "grpo", "cispo"))
    assert (gspo.clip_low, gspo.clip_high, gspo.weights, gspo.minibatches) == (3e-4, 4e-4, "sequence_mean", 4)
    assert (gspo.old_logprobs, gspo.routing_replay, gspo.kl) == ("engine", "off", "none")
    assert (dapo.clip_low, dapo.clip_high, dapo.weights, dapo.kl) == (0.2, 0.28, "token_mean", "none")
    assert (grpo.kl, grpo.kl_coef, grpo.kl_in, grpo.std) == ("k3", 0.04, "loss", "population")
    assert (cispo.clip_low, cispo.clip_high, cispo.weights) == (1.0, 4.0, "token_mean")
    assert (RECIPES["dr_grpo"].weights, RECIPES["dr_grpo"].advantage) == ("constant", "dr_grpo")
    assert (RECIPES["ppo"].dual_clip, RECIPES["ppo"].value_clip) == (3.0, 0.2)


@pytest.mark.parametrize("slot", SLOTS)
def test_a_part_is_found_by_its_name_and_says_what_it_is(slot: str) -> None:
    parts = builtin_parts(slot)
    used = {getattr(recipe, slot) for recipe in RECIPES.values()}
    assert used <= set(parts)
    for name, part in parts.items():
        assert part.meaning, name
        assert bool(part.formula) == (name != "none"), name
        assert all(setting.meaning for setting in part.settings.values()), name


def test_what_a_step_must_provide_follows_from_the_parts() -> None:
    needs = {name: set(recipe.needs) for name, recipe in RECIPES.items() if recipe.needs}
    assert needs == {
        "ppo": {"values"},
        "grpo": {"ref_logprobs"},
        "reinforce_pp": {"ref_logprobs", "old_logprobs"},  # the KL is in the reward
        "reinforce_pp_baseline": {"ref_logprobs"},
        "remax": {"greedy_rewards"},
        "minirl": {"engine_logprobs"},
    }
    without_groups = {name for name, recipe in RECIPES.items() if not recipe.compares_group}
    assert without_groups == {"ppo", "reinforce_pp", "remax"}


def test_a_pickled_recipe_is_the_same_recipe() -> None:
    for recipe in RECIPES.values():
        again = pickle.loads(pickle.dumps(recipe))
        assert again == recipe
        assert hash(again) == hash(recipe)
        assert again.use("ratio").func is recipe.use("ratio").func


def test_a_recipe_is_frozen_and_the_table_too() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["gspo"].clip_low = 1.0
    with pytest.raises(TypeError):
        RECIPES["gspo"].settings["clip_low"] = 1.0  # type: ignore[index]
    with pytest.raises(TypeError):
        RECIPES["mine"] = RECIPES["gspo"]  # type: ignore[index]


def test_a_row_can_be_changed_and_renamed_from_plain_data() -> None:
    changed = make_recipe({"name": "gspo", "clip_low": "2e-4"})  # YAML 1.1 reads 2e-4 as a string
    assert changed == get_recipe("gspo", clip_low=2e-4)
    assert changed.clip_high == 4e-4
    mine = make_recipe({"base": "gspo", "name": "mine", "minibatches": 2})
    assert (mine.name, mine.minibatches, mine.ratio) == ("mine", 2, "sequence")
    assert RECIPES["gspo"].minibatches == 4


def test_a_new_recipe_is_composed_from_named_parts_with_their_defaults() -> None:
    mine = make_recipe({"name": "mine", **PARTS_OF_MINE, "correction": "icepop"})
    assert (mine.clip_low, mine.clip_high, mine.dual_clip) == (0.2, 0.2, None)
    assert (mine.correction_low, mine.correction_high) == (0.5, 5.0)
    assert make_recipe(PARTS_OF_MINE).name == "custom"


def test_another_part_brings_its_own_defaults_and_drops_the_old_ones() -> None:
    soft = get_recipe("dapo", surrogate="sapo")
    assert soft.settings == {"std": "population", "tau_positive": 1.0, "tau_negative": 1.05}
    with pytest.raises(AttributeError, match="recipe 'dapo' has no setting 'clip_low'"):
        _ = soft.clip_low
    assert get_recipe("minirl", correction="mis").correction_high == 2.0
    assert "correction_high" not in get_recipe("minirl", correction="none").settings
    assert "kl_coef" not in get_recipe("grpo", kl="none").settings
    assert get_recipe("grpo", kl="k3").kl_coef == 0.04


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"name": "gpso"}, "unknown algorithm 'gpso'. Did you mean 'gspo'"),
        ({"base": "grop", "name": "mine"}, "unknown algorithm 'grop'. Did you mean 'grpo'"),
        ({"name": "mine", "advantage": "grpo"}, "give ratio, surrogate, weights too"),
        ({"name": "gspo", "clip_lo": 0.1}, "unknown field 'clip_lo'. Did you mean 'clip_low'"),
        ({"name": "gspo", "surrogate": "clipp"}, "unknown surrogate 'clipp'. Did you mean 'clip'"),
        ({"name": "gspo", "surrogate": ["clip"]}, "unknown surrogate ['clip']"),
        ({"name": "gspo", "weights": "token_mean"}, "would weigh a response by its length"),
        ({"name": "gspo_token", "weights": "constant"}, "would weigh a response by its length"),
        ({"name": "gmpo", "weights": "token_mean"}, "would weigh a response by its length"),
        ({"name": "gspo", "surrogate": "sapo"}, "set ratio: token"),
        ({"name": "dapo", "kl_coef": 0.1}, "kl_coef = 0.1 has no effect with kl 'none'"),
        ({"name": "dapo", "kl_in": "reward"}, "kl_in = 'reward' has no effect with kl 'none'"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip = 3.0 has no effect with surrogate 'cispo'"),
        ({"name": "rloo", "std": "bessel"}, "std = 'bessel' has no effect with advantage 'rloo'"),
        ({"name": "grpo", "gamma": 0.9}, "gamma = 0.9 has no effect with advantage 'grpo'"),
        ({"name": "dapo", "correction_high": 2.0}, "has no effect with correction 'none'"),
        ({"name": "ppo", "ratio": "sequence", "weights": "sequence_mean"}, "set ratio: sequence_token"),
        ({"name": "grpo", "kl": "k1", "kl_in": "loss"}, "constrains nothing"),
        ({"name": "grpo", "kl": "k3+", "kl_in": "reward"}, "a reward has none"),
        ({"name": "gspo", "correction": "tis"}, "makes them the same numbers"),
        ({"name": "gspo", "routing_replay": "recorded"}, "set old_logprobs: recompute"),
        ({"name": "dapo", "old_logprobs": "current"}, "makes every ratio 1"),
        ({"name": "dapo", "correction": "mis", "correction_low": 3.0}, "must lie below correction_high"),
        ({"name": "dapo", "clip_low": 1.5}, "clip_low is 1.5, it must be above 0 and at most 1"),
        ({"name": "dapo", "clip_high": 0}, "clip_high is 0, it must be above 0"),
        ({"name": "dapo", "clip_high": "wide"}, "clip_high is 'wide', it must be a number"),
        ({"name": "dapo", "clip_high": "nan"}, "clip_high is nan"),
        ({"name": "dapo", "clip_high": None}, "clip_high is None, it must be a number"),
        ({"name": "dapo", "entropy_coef": True}, "entropy_coef is True, it must be a number"),
        ({"name": "dapo", "minibatches": 0}, "minibatches is 0, it must be at least 1"),
        ({"name": "dapo", "minibatches": 2.5}, "minibatches is 2.5, it must be a whole number"),
        ({"name": "dapo", "dynamic_sampling": 1}, "must be true or false"),
        ({"name": "ppo", "gamma": 1.5}, "gamma is 1.5, it must be at least 0 and at most 1"),
        ({"name": "ppo", "dual_clip": 1.0}, "dual_clip is 1.0, it must be above 1"),
        ({"name": "grpo", "std": "sample"}, "std is 'sample', it must be one of population, bessel, none"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(mapping: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_recipe(mapping)
    assert says in str(refusal.value)


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(UserError, match="by its length"):
        dataclasses.replace(RECIPES["gspo"], weights="token_mean")


@pytest.mark.parametrize(
    ("name", "overrides", "moe", "minibatches", "expected"),
    [
        ("grpo", {}, True, 1, ("current", "off")),
        ("grpo", {}, True, 4, ("recompute", "recorded")),
        ("grpo", {}, False, 4, ("recompute", "off")),
        ("grpo", {"routing_replay": "engine"}, True, 4, ("recompute", "engine")),
        ("grpo", {"routing_replay": "engine"}, True, 1, ("current", "engine")),
        ("grpo", {"routing_replay": "recorded"}, True, 1, ("recompute", "recorded")),
        ("grpo", {"routing_replay": False}, True, 4, ("recompute", "off")),  # YAML 1.1's word for off
        ("grpo", {"old_logprobs": "engine"}, True, 4, ("engine", "off")),
        ("gspo", {}, True, None, ("engine", "off")),
        ("gspo", {"old_logprobs": "recompute"}, True, None, ("recompute", "off")),
        ("sapo", {}, True, None, ("recompute", "off")),
    ],
)
def test_auto_comes_to_the_passes_that_are_needed(
    name: str, overrides: dict[str, object], moe: bool, minibatches: int | None, expected: tuple[str, str]
) -> None:
    assert resolve_sources(get_recipe(name, **overrides), moe=moe, minibatches=minibatches) == expected


def test_passes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="is dense"):
        resolve_sources(get_recipe("grpo", routing_replay="engine"), moe=False)
    with pytest.raises(UserError, match="makes every ratio 1"):
        resolve_sources(get_recipe("grpo", old_logprobs="current"), moe=True, minibatches=2)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_shown_with_formula_source_and_every_default_it_reads(name: str) -> None:
    shown, recipe = render_algorithms(name), RECIPES[name]
    assert recipe.source in shown
    assert f"surrogate = {recipe.surrogate}" in shown
    for part in recipe.parts.values():
        assert part.formula in " ".join(shown.split())
    for key in ("clip_low", "gamma", "kl_coef", "correction_high", "tau_positive"):
        assert (f"  {key} = " in shown) == (key in recipe.settings)
    assert all(f"  {key} = " in shown for key in COMMON)
    assert max(map(len, shown.splitlines())) <= 110


def test_the_listing_names_every_recipe_and_an_unknown_one_is_refused() -> None:
    listing = render_algorithms()
    assert all(f"{name} " in listing for name in RECIPES)
    assert all(name in listing for slot in SLOTS for name in builtin_parts(slot))
    for typed in ("gpso", "GSPO"):
        with pytest.raises(UserError, match="Did you mean 'gspo'"):
            render_algorithms(typed)
    parts = {"advantage": "rloo", "ratio": "token", "surrogate": "clip", "weights": "token_mean"}
    with pytest.raises(UserError, match=r"unknown algorithm 'mine'.* Known: .*minirl\.$"):
        get_recipe("mine", **parts)  # no advice to give the parts that were given


def test_a_part_is_shown_with_its_settings_defaults_and_bounds() -> None:
    shown = " ".join(render_algorithms("clip").split())
    assert "surrogate clip: PPO's trust region" in shown
    assert (
        "clip_low: lower bound of the ratio is 1 - clip_low (a number above 0 and at most 1, 0.2 unless given)"
        in shown
    )
    assert "(a number above 1, or null, null unless given)" in shown
    assert "(one of loss, reward, reward unless given)" in render_algorithms("k1")


def test_the_page_has_the_table_and_a_section_for_every_recipe() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert recipe_table() in page, "python -m megarl.algorithms.describe prints the table as it is now"
    for name, recipe in RECIPES.items():
        section = page.split(f"### {name}\n")[1].split("### ")[0]
        assert "\n".join(["```text", *formula(recipe), "```"]) in section
        assert recipe.source in " ".join(section.split())
    for slot in SLOTS:
        assert part_table(slot) in page, (
            "python -m megarl.algorithms.describe prints the tables as they are now"
        )
        assert f"`{SLOTS[slot].module.replace('.', '/')}.py`" in page
    parts = [part for slot in SLOTS for part in builtin_parts(slot).values()]
    refused = [reason for part in parts for reasons in part.refused.values() for reason in reasons.values()]
    for reason in [rule.reason for rule in RULES] + refused:
        assert reason in " ".join(page.split())


def test_the_algorithms_import_torch_and_of_the_other_rooms_only_records() -> None:
    code = (
        "import sys, megarl.algorithms; "
        "print([n for n in sys.modules if n.startswith('megarl.') and n.split('.')[1] not in "
        "('algorithms', 'errors', 'records')]"
        " + [n for n in ('torch.distributed.run', 'megatron', 'sglang', 'pydantic', 'transformers')"
        " if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
