"""`math`: the final answer is right, wrong, or missing.

Our own rules find the answer (the whole text never goes to the grader), our own reader (`answer`) takes its
structure apart, and what is left, genuine formulas, is compared by computer algebra (`algebra`). The rules, with
their reasons, are the rows of `tests/fixtures/math_verdicts.jsonl`.

ground_truth: {"answer": text or number}; a list of them = any one of these is right.
"""

from __future__ import annotations

import functools
import math as _math
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import EOS_STRINGS, THINK, Tags, Text, answer_part, last_boxes, strip_eos
from megarl.rewards.verifiers.math.algebra import is_too_large
from megarl.rewards.verifiers.math.answer import THOUSANDS, Answer, Formula, read
from megarl.rewards.verifiers.math.deadline import OutOfTime, processor_seconds
from megarl.rewards.verifiers.math.equal import Percent, Rules, same
from megarl.rewards.verifiers.math.text import tidy

__all__ = ["equivalent", "math"]

Mode = Literal["strict", "lenient"]
Form = Literal["boxed", "answer_line", "hashes"]
FORMS: dict[str, tuple[Form, ...]] = {"strict": ("boxed",), "lenient": ("boxed", "answer_line", "hashes")}
# Processor time for one response, and for finding out whether the ground truth is at fault.
SECONDS, GOLD_SECONDS = 2.0, 0.5
# What stands before the answer; possessive, so that no run of blanks is tried twice.
_ANSWER_LINE = re.compile(
    r"(?:^[ \t>*_#-]*+(?:the[ \t]++)?(?:final[ \t]++)?answer[ \t*_]*+(?:is[ \t*_]*+:?|[:\uff1a])"
    r"|\bthe[ \t]++(?:final[ \t]++|correct[ \t]++)?answer[ \t]++is[ \t*_]*+:?"
    r"|\u7b54\u6848[ \t*_]*+(?:[\u662f\u4e3a][ \t*_]*+[:\uff1a]?|[:\uff1a]))",  # the same in Chinese
    re.IGNORECASE | re.MULTILINE,
)
_BEFORE = MappingProxyType({"answer_line": _ANSWER_LINE, "hashes": re.compile(r"^####", re.MULTILINE)})
_SENTENCE_END = re.compile(
    r"\.(?=\s|\Z)|\u3002|\s*[,;(—–-]?\s*\b(?<![\w\\{])"
    r"(?:because|since|as|so|which|where|given|hence|therefore|thus|due[ ]to)\b",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(r"[\s*_]*+(?:\\\[(.*?)\\\]|\$\$(.*?)\$\$)", re.DOTALL)
_FENCE = re.compile(r"[\s*_]*+```\w*\n(.*?)```", re.DOTALL)


def _warm() -> None:
    """Fill the parser's and sympy's caches: a first formula costs a second, a later one milliseconds."""
    for gold, answer in (
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        ("x^2+3x+2", "(x+1)(x+3)"),
        (r"2\pi r", r"2 \cdot \pi \cdot r"),
        (r"\log_2 8", "4"),
        (r"\frac{x^3-1}{x-1}", "x^{2}+x+1"),
        ("2x+3y=6", "4x+6y=12"),
        (r"e^{i\theta}", r"\cos\theta+i\sin\theta"),
        (r"\frac{n!}{2}", r"\binom{n}{2}"),
        ("|x-1|", "|1-x|"),
        ("a_1+f(x)", "a_{1}-f(x)"),
        (r"\sqrt[3]{2}", "2^{1/3}"),
        ("x+y>1", "y+x>1"),
        (r"y=\frac{c_1}{x}+c_2x^{1/2}", r"y=c_2\sqrt{x}+c_1x^{-1}"),
        (r"\begin{vmatrix}2&1\\1&2\end{vmatrix}", r"17\bmod 7"),
        (r"\operatorname{lcm}(4,6)", r"\sum_{k=1}^{3}2k"),
    ):
        equivalent(gold, answer)


@verifier(run_in="worker", timeout_s=5.0, warm=_warm)
def math(
    response: Response,
    ground_truth: GroundTruth,
    *,
    mode: Mode = "strict",
    forms: Annotated[tuple[Form, ...], Field(min_length=1)] | None = None,
    percent: Percent | None = None,
    think: Tags = THINK,
    eos: tuple[Text, ...] = EOS_STRINGS,
    max_characters: Annotated[int, Field(ge=1)] = 2000,
) -> Score:
    r"""Return 1 if the final answer equals the ground truth, 0 if not or if there is none.

    Part `answered`: 1 if there was an answer.

    mode: `strict` reads boxes only and compares exactly; `lenient` also reads "answer: ..." lines and "####
        ...", and accepts correct roundings and other notations of the same (see `Rules`).
    forms: where an answer may stand, first found first: `boxed` (\boxed, \fbox), `answer_line` ("the answer
        is 5", "Answer: 5"), `hashes` ("#### 5"); default by mode.
    percent: without a sign, `50%` equals 50 (`number`), 0.5 (`value`) or, by default, both (`either`).
    think: the tags around thinking, which is never read. eos: strings cut from the end.
    max_characters: a longer answer is compared as text only.
    """
    golds = _golds(ground_truth)
    answer = _final_answer(answer_part(response, think=think, eos=eos), forms or FORMS[mode])
    if answer is None:
        return Score(0.0, {"answered": 0.0}, "no final answer")
    rules = Rules(percent or "either", lenient=mode == "lenient")
    right, reason = _judge_in_time(golds, strip_eos(answer, eos), rules, max_characters)
    return Score(float(right), {"answered": 1.0}, reason)


def equivalent(gold: str, answer: str, *, mode: Mode = "strict", percent: Percent | None = None) -> bool:
    """Return whether two bare answers (no box, no sentence around them) are the same. Symmetric."""
    rules = Rules(percent or "either", lenient=mode == "lenient")
    return _judge((gold,), answer, rules, max_characters=2000)[0]


def _judge_in_time(
    golds: Sequence[str], answer: str, rules: Rules, max_characters: int
) -> tuple[bool, str | None]:
    """Judge within the budget. What takes longer is wrong, unless it is the ground truth that can't be worked out."""
    try:
        with processor_seconds(SECONDS):
            right, reason = _judge(golds, answer, rules, max_characters)
    except OutOfTime:
        right, reason = False, f"not worked out within {SECONDS:g} s of processor time"
    if not right:
        try:
            with processor_seconds(GOLD_SECONDS):
                _refuse_too_large(golds)
        except OutOfTime:
            raise BadGroundTruth(
                f"'answer' cannot be worked out in {GOLD_SECONDS:g} s: {golds!r:.200}"
            ) from None
    return right, reason


def _refuse_too_large(golds: Sequence[str]) -> None:
    for gold in golds:
        for reading in _read(gold, False):
            if isinstance(reading, Formula) and is_too_large(reading.latex):
                raise BadGroundTruth(
                    f"'answer' is {gold!r:.200}: its value is too large to be compared with another text"
                )


def _judge(golds: Sequence[str], answer: str, rules: Rules, max_characters: int) -> tuple[bool, str | None]:
    if len(answer) > max_characters:
        return answer in golds, "answer too long to be compared as a formula"
    readings = _read(answer, rules.lenient)
    if not readings:
        return False, "empty answer"
    return any(
        same(g, a, rules) for gold in golds for g in _read(gold, rules.lenient) for a in readings
    ), None


@functools.lru_cache(maxsize=8192)
def _read(text: str, lenient: bool) -> tuple[Answer, ...]:
    """Return what a text may mean: one reading; leniently, "100,200" is a list too. () for an empty one."""
    spelled = tidy(text)
    readings = [read(spelled)]
    if lenient and THOUSANDS.search(spelled):
        readings.append(read(spelled.replace(",", ", ")))
    return tuple(reading for reading in readings if reading is not None)


def _golds(ground_truth: GroundTruth) -> tuple[str, ...]:
    if "answer" not in ground_truth:
        raise BadGroundTruth("a math ground truth needs 'answer'")
    given = ground_truth["answer"]
    golds = tuple(_gold(one) for one in (given if isinstance(given, (list, tuple)) else [given]))
    if not golds:
        raise BadGroundTruth("'answer' is an empty list")
    return golds


def _gold(given: Any) -> str:
    if isinstance(given, bool) or not isinstance(given, (str, int, float)):
        raise BadGroundTruth(f"'answer' is {given!r}: a math answer is a text or a number")
    if isinstance(given, float) and not _math.isfinite(given):
        raise BadGroundTruth(f"'answer' is {given}")
    text = str(given).strip()
    box = last_boxes(text)
    text = text if box is None else box
    if not _read(text, False):
        raise BadGroundTruth(f"'answer' is empty: {given!r}")
    return text


def _final_answer(text: str, forms: tuple[Form, ...]) -> str | None:
    """Return the final answer in the first of `forms` that the text has, the last of its kind, or None.

    Boxes joined by a comma, "and" or "or" are one list. An unclosed box (a truncated response) doesn't hide an earlier
    one; an empty box is an empty answer, not "no answer". Every scan is linear in the text.
    text: without thinking and end-of-sequence strings (see `answer_part`).
    """
    found = (_after_last(_BEFORE[form], text) if form in _BEFORE else last_boxes(text) for form in forms)
    return next((answer for answer in found if answer is not None), None)


def _after_last(prefix: re.Pattern[str], text: str) -> str | None:
    """Return what stands behind the last match: the rest of its line, else the next line with anything in it.

    It ends with its sentence, or where a reason begins. "" if nothing follows: the text was cut off there, and what it
    said before is not its answer. None without a match.
    """
    start = max((match.end() for match in prefix.finditer(text)), default=None)
    if start is None:
        return None
    if block := _DISPLAYED.match(text, start) or _FENCE.match(text, start):
        return next(group for group in block.groups() if group is not None).strip()
    line = text[start:].lstrip(" \t\r\n*_`").partition("\n")[0].strip(" \t*_`")
    box = last_boxes(line)
    return _SENTENCE_END.split(line, maxsplit=1)[0].strip(" \t*_`") if box is None else box
