"""Recipes in words: what `megarl algorithms [NAME]` prints, and the table of docs/algorithms.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from megarl.algorithms.parts import PARTS, SETTINGS, Part, owners
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.recipes import RECIPES, get_recipe

WIDTH = 110


def render_algorithms(name: str | None = None) -> str:
    """All recipes in one line each, or one with its formula and every default. UserError for an unknown
    name."""
    return render_recipe(get_recipe(name)) if name is not None else _render_all()


def render_recipe(recipe: Recipe) -> str:
    """What it is for, its source, its formula with every part spelled out, and every setting with its
    meaning."""
    lines = [f"{recipe.name}: {recipe.title}" if recipe.title else recipe.name]
    if recipe.description:
        lines += ["", *textwrap.wrap(recipe.description, WIDTH)]
    if recipe.source:
        lines += [f"Source: {recipe.source}"]
    lines += ["", "Formula", *_wrapped(formula(recipe)), "", "Parts and settings"]
    lines += _wrapped(f"{slot} = {getattr(recipe, slot)}: {part_of(recipe, slot).meaning}" for slot in PARTS)
    keys = settings_in_use(recipe)
    lines += _wrapped(f"{key} = {show(getattr(recipe, key))}: {SETTINGS[key].meaning}" for key in keys)
    return "\n".join(lines) + "\n"


def _wrapped(lines: Iterable[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="      ")
    return [row for line in lines for row in wrapper.wrap(line)]


def formula(recipe: Recipe) -> list[str]:
    """The objective, one line per part, as the code computes it."""
    correction = "c_t " if recipe.correction != "none" else ""
    kl = " + kl_coef kl_t" if recipe.needs_reference and recipe.kl_in == "loss" else ""
    entropy = " - entropy_coef H_t" if recipe.entropy_coef else ""
    terms = f"{correction}l_t{kl}{entropy}"
    total = f"loss = sum_t w_t ({terms})" if kl or entropy else f"loss = sum_t w_t {terms}"
    lines = [total, *(part_of(recipe, slot).formula for slot in PARTS)]
    if recipe.off_policy_delta is not None:
        lines.append("l_t = 0 where A < 0 and mean(old - logp) > off_policy_delta")
    if recipe.has_reward_kl and not recipe.has_token_advantages:
        lines.append("R <- R - kl_coef sum_t kl_t")
    return [line for line in lines if line]


def settings_in_use(recipe: Recipe) -> Iterator[str]:
    """Settings that the recipe's parts read, in the order of `SETTINGS`."""
    for key in SETTINGS:
        owner = owners(key)
        if owner is None or getattr(recipe, owner[0]) in owner[1]:
            yield key


def part_of(recipe: Recipe, slot: str) -> Part:
    """The part that a recipe picked for a slot."""
    return PARTS[slot][getattr(recipe, slot)]


def recipe_table() -> str:
    """All recipes by part, as a Markdown table."""
    head = [
        "recipe",
        "advantage",
        "ratio",
        "surrogate",
        "bounds",
        "weights",
        "KL",
        "correction",
        "old",
        "mini-batches",
    ]
    rows = [
        [
            f"[`{r.name}`](#{r.name})",
            r.advantage + (f" ({r.std})" if r.std != "none" else ""),
            r.ratio,
            r.surrogate,
            bounds(r),
            r.weights,
            f"{r.kl} {show(r.kl_coef)} in {r.kl_in}" if r.needs_reference else "-",
            f"{r.correction} {show(r.correction_high)}" if r.correction != "none" else "-",
            r.old_logprobs,
            str(r.minibatches),
        ]
        for r in RECIPES.values()
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def bounds(recipe: Recipe) -> str:
    """The surrogate's settings in brief."""
    if recipe.tau_positive is not None:
        return f"tau {show(recipe.tau_positive)} / {show(recipe.tau_negative)}"
    dual = f", dual {show(recipe.dual_clip)}" if recipe.dual_clip is not None else ""
    return f"{show(recipe.clip_low)} / {show(recipe.clip_high)}{dual}"


def show(value: object) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _render_all() -> str:
    width = max(map(len, RECIPES))
    lines = [f"{name:<{width}}  {recipe.title}" for name, recipe in RECIPES.items()]
    lines += ["", "`megarl algorithms NAME` shows the formula, the source and every default."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(recipe_table(), end="")
