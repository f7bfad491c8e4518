"""`exact` and `multiple_choice`: the answer is one of a few known texts."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.extraction import Extract, answer_part, extract
from megarl.rewards.registry import BadReference, Reference, Response, Score, verifier

_PUNCTUATION = re.compile(r"[^\w\s]")
_LETTER = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_LETTER_AND_TEXT = re.compile(r"[\s(\[*]*([A-Za-z])\s*[).:\]]\s*(\S.*)", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf)\s*\{([^{}]*)\}")


@verifier(place="inline")
def exact(
    response: Response,
    reference: Reference,
    *,
    extraction: Extract = "auto",
    answer_marker: str = "Answer:",
    tag: str = "answer",
    ignore_case: bool = False,
    ignore_space: bool = True,
    ignore_punctuation: bool = False,
) -> Score:
    """1 if the answer is the reference's text, else 0.

    reference: {"answer": text or number}, or a list of them, any of which is right.
    extraction, answer_marker, tag: where the answer stands, see `extraction.extract`.
    ignore_space: runs of white space count as one space, those at the ends as none.
    """

    def normal(text: str) -> str:
        text = text.casefold() if ignore_case else text
        text = _PUNCTUATION.sub("", text) if ignore_punctuation else text
        return " ".join(text.split()) if ignore_space else text

    golds = [normal(gold) for gold in texts_of(reference)]
    answer = extract(answer_part(response), extraction, marker=answer_marker, tag=tag)
    if not answer or not normal(answer):
        return Score(0.0, reason="no answer found")
    return Score(float(normal(answer) in golds))


@verifier(place="inline")
def multiple_choice(
    response: Response,
    reference: Reference,
    *,
    extraction: Extract = "auto",
    answer_marker: str = "Answer:",
    tag: str = "answer",
) -> Score:
    """1 if the answer names the right choice and no other, else 0.

    reference: {"answer": letter, index from 0, or text of the choice; "choices": the texts, where known}.
    The answer may be a letter ("B", "(b)", "**B.**"), a letter with its choice's text, or the text alone. A
    letter somewhere in a sentence is no answer ("A train leaves..."), and neither are two ("A or B").
    """
    choices = _choices(reference)
    gold = _right_letter(reference, choices)
    answer = extract(answer_part(response), extraction, marker=answer_marker, tag=tag)
    if not answer:
        return Score(0.0, reason="no answer found")
    letter = _letter(_TEXT_COMMAND.sub(r"\1", answer).strip(), choices)
    return Score(float(letter == gold), reason=None if letter else "no single choice named")


def texts_of(reference: Reference, key: str = "answer") -> list[str]:
    """The reference's answer or answers, as texts."""
    given = reference.get(key)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        if (
            not isinstance(one, (str, int, float))
            or isinstance(one, bool)
            or one != one
            or not str(one).strip()
        ):
            raise BadReference(f"{key!r} is {given!r}: a text or number, or a list of them, is needed")
    if not found:
        raise BadReference(f"{key!r} is an empty list")
    return [str(one) for one in found]


def _choices(reference: Reference) -> list[str]:
    choices: Any = reference.get("choices") or []
    if not isinstance(choices, (list, tuple)) or len(choices) > 26:
        raise BadReference(f"'choices' is {choices!r}: a list of up to 26 texts is needed")
    return [_plain(str(choice)) for choice in choices]


def _right_letter(reference: Reference, choices: list[str]) -> str:
    given = reference.get("answer")
    if isinstance(given, int) and not isinstance(given, bool):
        letter = chr(ord("A") + given) if 0 <= given < 26 else ""
    elif isinstance(given, str):
        letter = _letter(given, choices) or ""
    else:
        letter = ""
    if not letter or (choices and ord(letter) - ord("A") >= len(choices)):
        raise BadReference(f"'answer' is {given!r}: neither a choice's letter, nor its index, nor its text")
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
    return " ".join(text.casefold().split()).strip(" .")
