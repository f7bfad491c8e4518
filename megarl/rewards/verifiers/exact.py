"""`exact`: the answer is the text that the ground truth gives."""

from __future__ import annotations

import re

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import Extract, answer_part, extract

_PUNCTUATION = re.compile(r"[^\w\s]")


@verifier(run_in="inline")
def exact(
    response: Response,
    ground_truth: GroundTruth,
    *,
    extraction: Extract = "auto",
    answer_marker: str = "Answer:",
    tag: str = "answer",
    ignore_case: bool = False,
    ignore_space: bool = True,
    ignore_punctuation: bool = False,
) -> Score:
    """Return 1 if the answer is the ground truth's text, else 0.

    ground_truth: {"answer": text or number}, or a list of them, any of which is right.
    extraction, answer_marker, tag: where the answer stands, see `extraction.extract`.
    ignore_space: runs of white space count as one space, those at the ends as none.
    """

    def normal(text: str) -> str:
        text = text.casefold() if ignore_case else text
        text = _PUNCTUATION.sub("", text) if ignore_punctuation else text
        return " ".join(text.split()) if ignore_space else text

    golds = [normal(gold) for gold in texts_of(ground_truth)]
    answer = extract(answer_part(response), extraction, marker=answer_marker, tag=tag)
    if not answer or not normal(answer):
        return Score(0.0, reason="no answer found")
    return Score(float(normal(answer) in golds))


def texts_of(ground_truth: GroundTruth, key: str = "answer") -> list[str]:
    """Return the ground truth's answer or answers, as texts."""
    given = ground_truth.get(key)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        number = isinstance(one, (int, float)) and not isinstance(one, bool) and one == one
        if not number and not (isinstance(one, str) and one.strip()):
            raise BadGroundTruth(f"{key!r} is {given!r}: a text or number, or a list of them, is needed")
    if not found:
        raise BadGroundTruth(f"{key!r} is an empty list")
    return [str(one) for one in found]
