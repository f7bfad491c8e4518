"""The model families megarl knows, by the name in an HF config's `architectures`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from megarl.errors import UserError, did_you_mean
from megarl.weights.families.base import Entry, Family
from megarl.weights.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from megarl.weights.families.glm4_moe import GLM4_MOE
from megarl.weights.families.llama import LLAMA
from megarl.weights.families.mixtral import MIXTRAL
from megarl.weights.families.olmoe import OLMOE
from megarl.weights.families.qwen import QWEN2, QWEN3

FAMILIES: tuple[Family, ...] = (
    QWEN3,
    QWEN2,
    MIXTRAL,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    OLMOE,
    LLAMA,
)

ENTRY_POINTS = "megarl.families"

__all__ = ["FAMILIES", "Entry", "Family", "family_of"]


def family_of(config: Mapping[str, Any], *, source: str = "config.json") -> Family:
    """Return the family of an HF config: one of megarl's, or of a package that declares its own.

    An installed package declares a family of its own by an entry point of the group `megarl.families` that names a
    `Family`. Raises UserError that names the architecture and lists the known ones.
    """
    names = config.get("architectures") or []
    known = _by_architecture(FAMILIES)
    if not known.keys() & set(names):
        known |= _by_architecture(point.load() for point in entry_points(group=ENTRY_POINTS))
    for name in names:
        if name in known:
            return known[name]
    asked = names[0] if names else "none (the key 'architectures' is missing)"
    raise UserError(
        f"{source}: architecture {asked} is not supported.{did_you_mean(str(asked), known)} "
        f"Supported: {', '.join(sorted(known))}"
    )


def _by_architecture(families: Iterable[Family]) -> dict[str, Family]:
    return {name: family for family in families for name in family.architectures}
