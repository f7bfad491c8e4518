"""`repetition`: a penalty for a response that says the same again and again."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from megarl.rewards.contract import GroundTruth, Response, Score, verifier
from megarl.rewards.verifiers.language_consistency import IDEOGRAPHS

# A run of signs without a space is cut, and a long one of blanks counts, so that "aaaa..." is a loop, too.
_PIECES = re.compile(rf"[{IDEOGRAPHS}]|[^\s{IDEOGRAPHS}]{{1,20}}|\s{{20}}")


@verifier(run_in="inline")
def repetition(
    response: Response,
    ground_truth: GroundTruth,
    *,
    ngram: Annotated[int, Field(ge=1)] = 6,
    allowed: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    unit: Literal["words", "characters"] = "words",
) -> Score:
    """Return 0 while at most a share `allowed` of the n-grams has occurred before, falling to -1 when all have.

    An ideogram is a word; one longer than 20 characters is cut into such pieces.
    Part `share`: the share of repeated n-grams. Linear in the text.
    """
    units: list[str] = _PIECES.findall(response.text) if unit == "words" else list(response.text)
    total = len(units) - ngram + 1
    if total <= 0:
        return Score(0.0, {"share": 0.0})
    share = 1.0 - len({tuple(units[i : i + ngram]) for i in range(total)}) / total
    return Score(-max(share - allowed, 0.0) / (1.0 - allowed), {"share": share})
