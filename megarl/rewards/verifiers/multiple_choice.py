"""`multiple_choice`: the answer names the right one of several choices."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import Extract, TagName, Text, answer_part, extract

_LETTER = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_LETTER_AND_TEXT = re.compile(r"[\s(\[*]*([A-Za-z])\s*[).:\]]\s*(\S.*)", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf)\s*\{([^{}]*)\}")


@verifier(run_in="inline")
def multiple_choice(
    response: Response,
    ground_truth: GroundTruth,
    *,
    extraction: Extract = "auto",
    answer_marker: Text = "Answer:",
    tag: TagName = "answer",
) -> Score:
    """Return 1 if the answer names the right choice and no other, else 0.

    ground_truth: {"answer": letter, index from 0, or text of the choice; "choices": the texts, where known}.
    The answer may be a letter ("B", "(b)", "**B.**"), a letter with its choice's text, or the text alone. A
    letter somewhere in a sentence is no answer ("A train leaves..."), and neither are two ("A or B").
    """
    choices = _choices(ground_truth)
    gold = _right_letter(ground_truth, choices)
    answer = extract(answer_part(response), extraction, marker=answer_marker, tag=tag)
    if not answer:
        return Score(0.0, reason="no answer found")
    letter = _letter(_TEXT_COMMAND.sub(r"\1", answer).strip(), choices)
    return Score(float(letter == gold), reason=None if letter else "no single choice named")


def _choices(ground_truth: GroundTruth) -> list[str]:
    choices: Any = ground_truth.get("choices") or []
    if not isinstance(choices, (list, tuple)) or len(choices) > 26:
        raise BadGroundTruth(f"'choices' is {choices!r}: a list of up to 26 texts is needed")
    return [_plain(str(choice)) for choice in choices]


def _right_letter(ground_truth: GroundTruth, choices: list[str]) -> str:
    given = ground_truth.get("answer")
    letter = _letter(given, choices) if isinstance(given, str) else None
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 26:
        letter = chr(ord("A") + given)
    if not letter or (choices and ord(letter) - ord("A") >= len(choices)):
        raise BadGroundTruth(f"'answer' is {given!r}: neither a choice's letter, nor its index, nor its text")
    return letter


def _letter(answer: str, choices: list[str]) -> str | None:
    plain = _plain(answer)
    if choices.count(plain) == 1:
        return chr(ord("A") + choices.index(plain))
    if match := _LETTER.fullmatch(answer):
        return match[1].upper()
    match = _LETTER_AND_TEXT.fullmatch(answer)
    if match is None:
        return None
    letter = match[1].upper()
    if choices:
        index = ord(letter) - ord("A")
        return letter if index < len(choices) and choices[index] == _plain(match[2]) else None
    return None if re.search(r"\b(?:or|and)\b|[([][a-z][)\]]", match[2], re.IGNORECASE) else letter


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")  # a point at the beginning is a decimal one
