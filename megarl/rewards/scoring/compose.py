"""Several scores become one reward: weighted sum, gates, clipping. Pure functions; every part stays
visible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.rewards.contract import BAD_GROUND_TRUTH, Score
from megarl.rewards.settings import Part

Bounds = tuple[float, float]


@dataclass(frozen=True)
class PartScore:
    """A part and the score its verifier gave."""

    part: Part
    score: Score

    @property
    def shuts(self) -> bool:
        """A gate that is not passed (or could not be judged) ends the scoring."""
        gate = self.part.gate
        return gate is not None and (self.score.value is None or self.score.value < gate)

    @property
    def share(self) -> float | None:
        """weight * clipped score."""
        return (
            None if self.score.value is None else self.part.weight * clamp(self.score.value, self.part.clip)
        )


_KINDS = (
    ("timed_out", re.compile(r"timed out after")),
    ("bad_ground_truth", re.compile(re.escape(BAD_GROUND_TRUTH))),
    ("worker_died", re.compile(r"scoring worker died")),
    ("sandbox", re.compile(r"sandbox:")),
    ("raised", re.compile(r"raised \w+:")),
    ("no_number", re.compile(r"returned ")),
    ("service", re.compile(r"\b(?:service|judge|HTTP|http)")),
)


def reason_kind(reason: str) -> str:
    """Return what sort of reason left a response unscored, in one word, for counting."""
    return next((kind for kind, pattern in _KINDS if pattern.search(reason)), "other")


def clamp(value: float, bounds: Bounds | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def compose(
    results: Sequence[PartScore], *, gate_value: float, clip: Bounds | None
) -> tuple[float | None, dict[str, float | None], str | None]:
    """(reward, parts, reason).

    A part that counts and could not be scored makes the reward None: a sum with a hole would be a wrong
    number. A shut gate gives `gate_value` whatever the rest. Parts of weight 0 are logged only. `parts` holds
    raw scores by part name, and a verifier's own sub-scores as `<part>/<sub-score>`.
    """
    parts: dict[str, float | None] = {}
    for result in results:
        parts[result.part.name] = result.score.value
        parts |= {f"{result.part.name}/{key}": value for key, value in result.score.parts.items()}
    reward = 0.0
    for result in results:
        counts = result.part.weight != 0 or result.part.gate is not None
        if result.score.value is None and counts:
            return None, parts, f"{result.part.name}: {result.score.reason}"
        if result.shuts:
            return gate_value, parts, None
        reward += result.share or 0.0
    return clamp(reward, clip), parts, None
