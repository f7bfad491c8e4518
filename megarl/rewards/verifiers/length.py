"""`length`: a penalty for a response that is too long or too short."""

from __future__ import annotations

import re
from typing import Literal

from megarl.errors import UserError
from megarl.rewards.contract import GroundTruth, Response, Score, verifier
from megarl.rewards.verifiers.language_consistency import IDEOGRAPHS

Unit = Literal["tokens", "words", "characters"]

_WORDS = re.compile(rf"[{IDEOGRAPHS}]|[^\s{IDEOGRAPHS}]+")


def _check_length(*, start: int, end: int, least: int = 0, **_: object) -> None:
    if not 0 <= least <= start < end:
        raise UserError(f"length: 0 <= least <= start < end is needed, not {least}, {start}, {end}")


@verifier(run_in="inline", check=_check_length)
def length(
    response: Response,
    ground_truth: GroundTruth,
    *,
    start: int,
    end: int,
    least: int = 0,
    unit: Unit = "tokens",
) -> Score:
    """Return 0 up to `start` units, falling in a straight line to -1 at `end`; also -1 below `least`.

    As a shaping part it is weighed like any other. DAPO's soft overlong punishment has this form too, but
    belongs after the grouping decisions: the training loop adds it (see `megarl.rollout.filters`).
    """
    if unit == "tokens":
        if response.tokens is None:
            return Score(None, reason="the response's tokens are not known; count words or characters")
        amount = response.tokens
    else:
        amount = len(_WORDS.findall(response.text)) if unit == "words" else len(response.text)
    if amount < least:
        return Score(-1.0, reason="too short")
    return Score(-min(max((amount - start) / (end - start), 0.0), 1.0))
