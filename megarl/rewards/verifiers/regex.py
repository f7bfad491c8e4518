"""`regex`: the answer matches a pattern."""

from __future__ import annotations

from typing import Annotated, Any

import regex as engine
from pydantic import Field

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import Extract, TagName, Text, answer_part, extract
from megarl.rewards.verifiers.exact import texts_of


def _check_pattern(*, pattern: str | None = None, **_: object) -> None:
    if pattern is not None:
        _compiled(pattern)


@verifier(run_in="worker", timeout_s=5.0, check=_check_pattern)
def regex(
    response: Response,
    ground_truth: GroundTruth,
    *,
    pattern: Text | None = None,
    full: bool = False,
    ignore_case: bool = False,
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0,
    extraction: Extract = "whole",
    answer_marker: Text = "Answer:",
    tag: TagName = "answer",
) -> Score:
    """Return 1 if the pattern is found (`full`: if it matches from beginning to end), else 0.

    pattern: for every prompt; otherwise the ground truth's. ground_truth: {"pattern": ..., "answer": optional};
        with an answer, the pattern's last match must have a first group (or, without groups, be) that answer.
    seconds: a pattern may backtrack without end on the wrong text; after this long the response is unscored.
    The syntax is that of the `regex` package, a superset of Python's `re`.
    """
    source = pattern if pattern is not None else ground_truth.get("pattern")
    if not isinstance(source, str):
        raise BadGroundTruth("a regex task needs a 'pattern', in its ground truth or among the options")
    compiled = _compiled(source, engine.IGNORECASE if ignore_case else 0)
    text = extract(answer_part(response), extraction, marker=answer_marker, tag=tag)
    if text is None:
        return Score(0.0, reason="no answer found")
    try:
        if full:
            found = [match] if (match := compiled.fullmatch(text, timeout=seconds)) else []
        else:
            found = list(compiled.finditer(text, timeout=seconds))
    except TimeoutError:
        return Score(None, reason=f"the pattern took longer than {seconds:g} s")
    if not found or "answer" not in ground_truth:
        return Score(float(bool(found)))
    value = found[-1].group(1 if compiled.groups else 0)
    return Score(float(value is not None and value.strip() in texts_of(ground_truth)))


def _compiled(pattern: str, flags: int = 0) -> Any:
    try:
        return engine.compile(pattern, flags)
    except engine.error as error:
        raise BadGroundTruth(f"the pattern {pattern!r} is wrong: {error}") from None
