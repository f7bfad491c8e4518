"""Recipes and parts in words: what `megarl algorithms [NAME]` prints, and the tables of docs/algorithms.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from megarl.algorithms.parts import KINDS, REQUIRED, SLOTS, Part, Setting, builtin_parts, load_part
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.recipes import RECIPES, get_recipe

WIDTH = 110


def render_algorithms(name: str | None = None) -> str:
    """Return all recipes and parts in a few lines, or one of them with its formula and every default.

    name: a recipe's or a part's; a user's own part by its import path. Raises UserError for an unknown name.
    """
    if name is None:
        return _render_all()
    if name in RECIPES:
        return render_recipe(RECIPES[name])
    if ":" in name:
        return render_part(load_part(name))
    parts = [parts[name] for slot in SLOTS if name in (parts := builtin_parts(slot)) and name != "none"]
    return "\n".join(map(render_part, parts)) if parts else render_recipe(get_recipe(name))


def render_recipe(recipe: Recipe) -> str:
    """What it is for, its source, its formula with every part spelled out, and every setting with its meaning."""
    lines = [f"{recipe.name}: {recipe.title}" if recipe.title else recipe.name]
    if recipe.description:
        lines += ["", *textwrap.wrap(recipe.description, WIDTH)]
    if recipe.source:
        lines += [f"Source: {recipe.source}"]
    lines += ["", "Formula", *_wrapped(formula(recipe)), "", "Parts and settings"]
    lines += _wrapped(
        f"{slot} = {getattr(recipe, slot)}: {part.meaning}" for slot, part in recipe.parts.items()
    )
    lines += _wrapped(
        f"{key} = {show(getattr(recipe, key))}: {setting.meaning}"
        for key, setting in recipe.settings_in_use().items()
    )
    return "\n".join(lines) + "\n"


def render_part(part: Part) -> str:
    """Return what it means, its formula, and its settings with their defaults and bounds."""
    lines = [f"{part.slot} {part.name}: {part.meaning}", *_wrapped([part.formula])]
    lines += _wrapped(f"{key}: {describe(setting)}" for key, setting in part.settings.items())
    return "\n".join(lines) + "\n"


def describe(setting: Setting) -> str:
    """Return its meaning, default and bounds."""
    kind = f"one of {', '.join(setting.kind)}" if isinstance(setting.kind, tuple) else KINDS[setting.kind][0]
    default = "must be given" if setting.default is REQUIRED else f"{show(setting.default)} unless given"
    words = [
        " ".join(filter(None, (kind, setting.bounds))),
        *(["or null"] if setting.optional else []),
        default,
    ]
    return f"{setting.meaning} ({', '.join(words)})".strip()


def _wrapped(lines: Iterable[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="      ")
    return [row for line in lines for row in wrapper.wrap(line)]


def formula(recipe: Recipe) -> list[str]:
    """Return the objective, one line per part, as the code computes it."""
    correction = "c_t " if recipe.correction != "none" else ""
    kl = " + kl_coef kl_t" if recipe.kl != "none" and recipe.kl_in == "loss" else ""
    entropy = " - entropy_coef H_t" if recipe.entropy_coef else ""
    terms = f"{correction}l_t{kl}{entropy}"
    total = f"loss = sum_t w_t ({terms})" if kl or entropy else f"loss = sum_t w_t {terms}"
    lines = [total, *(part.formula for part in recipe.parts.values())]
    if recipe.off_policy_delta is not None:
        lines.append("l_t = 0 where A < 0 and mean(old - logp) > off_policy_delta")
    if recipe.has_reward_kl and not recipe.has_token_advantages:
        lines.append("R <- R - kl_coef sum_t kl_t")
    return [line for line in lines if line]


def recipe_table() -> str:
    """Return all recipes by part, as a Markdown table."""
    head = ["recipe", *SLOTS, "settings of the parts", "old", "mini-batches"]
    rows = [
        [
            f"[`{r.name}`](#{r.name})",
            *(getattr(r, slot) for slot in SLOTS),
            ", ".join(f"{name} {show(value)}" for name, value in r.settings.items() if value is not None),
            r.old_logprobs,
            str(r.minibatches),
        ]
        for r in RECIPES.values()
    ]
    return _markdown([head, *rows])


def part_table(slot: str) -> str:
    """Return megarl's own parts for a slot, as a Markdown table."""
    rows = [
        [
            f"`{part.name}`",
            part.meaning,
            ", ".join(f"`{name}: {show(setting.default)}`" for name, setting in part.settings.items()) or "-",
        ]
        for part in builtin_parts(slot).values()
    ]
    return _markdown([[slot, "meaning", "its own settings and their defaults"], *rows])


def _markdown(rows: list[list[str]]) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rest]) + "\n"


def show(value: object) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _render_all() -> str:
    width = max(map(len, RECIPES))
    lines = [f"{name:<{width}}  {recipe.title}" for name, recipe in RECIPES.items()]
    lines += ["", "Parts to compose your own from, or to change in one of them", ""]
    lines += _wrapped(f"{slot}: {', '.join(builtin_parts(slot))}" for slot in SLOTS)
    lines += [
        "",
        *textwrap.wrap(
            "`megarl algorithms NAME` shows the formula, the source and every default of a recipe or a part; a part of "
            "your own is named by its import path, package.module:name.",
            WIDTH,
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print("\n".join([recipe_table(), *map(part_table, SLOTS)]), end="")
