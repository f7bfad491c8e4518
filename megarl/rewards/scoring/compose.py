"""Several scores become one reward: weighted sum, gates, clipping. Pure functions; every part stays visible."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.rewards.contract import BAD_GROUND_TRUTH, Score
from megarl.rewards.settings import Bounds, Part


@dataclass(frozen=True)
class PartScore:
    """A part and the score its verifier gave."""

    part: Part
    score: Score

    @property
    def shuts(self) -> bool:
        """Return whether this is a gate that is not passed, or could not be judged: it ends the scoring."""
        gate = self.part.gate
        return gate is not None and (self.score.value is None or self.score.value < gate)


@dataclass(frozen=True)
class Scored:
    """A response's reward and what it is made of.

    reward: None = unscored, and `reason` says why. parts: every part's raw score (before clip and weight) by name.
    """

    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    reason: str | None = None


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


def compose(results: Sequence[PartScore], *, gate_value: float, clip: Bounds | None) -> Scored:
    """Return the weighted sum of the clipped scores, clipped.

    A part that counts and could not be scored makes the reward None: a sum with a hole would be a wrong number. A
    shut gate gives `gate_value` whatever the rest. Parts of weight 0 are logged only. A verifier's own sub-scores
    are among the parts as `<part>/<sub-score>`.
    """
    parts: dict[str, float | None] = {}
    for result in results:
        parts[result.part.name] = result.score.value
        parts |= {f"{result.part.name}/{key}": value for key, value in result.score.parts.items()}
    reward = 0.0
    for result in results:
        part, value = result.part, result.score.value
        if value is None and (part.weight != 0 or part.gate is not None):
            return Scored(None, parts, f"{part.name}: {result.score.reason}")
        if result.shuts:
            return Scored(gate_value, parts)
        if value is not None:
            reward += part.weight * clamp(value, part.clip)
    return Scored(clamp(reward, clip), parts)
