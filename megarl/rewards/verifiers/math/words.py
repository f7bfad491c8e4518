"""Answers in words: names, days, "no solution", the letter of a choice."""

from __future__ import annotations

import re

TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"([A-Z])|\(\s*([A-Za-z])\s*\)")
_FORMULA_SIGN = re.compile(r"[\\+*/=^_<>|{}\[\]]")
_FUNCTION = re.compile(
    r"\b(?:(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|pi|max|min|lim|gcd|lcm|mod|det)\b"
)
_FIRST_WORD = re.compile(r"[^\d()-]*?(?<![^\W\d_])(?:[^\W\d_]{3}|no\b)", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")  # no difference
_HYPHEN = re.compile(r"(?=(?<![A-Za-z])([A-Za-z]*)\s?-\s?([A-Za-z]*))")


def words_of(text: str) -> str | None:
    r"""Return the normal form (no case, no outer punctuation, single spaces) of a tidy text; None for a formula.

    A word has three letters or more: "ab" is a product. "x-axis" is a word, "p-q" a difference. A single
    capital, or a letter in parentheses, is a choice and keeps its case.
    """
    text = TEXT_COMMAND.sub(r" \1 ", text).strip(" .\"'")
    if choice := _CHOICE.fullmatch(text):
        return choice[1] or choice[2]
    if _DATE.fullmatch(text):
        return text
    if _FORMULA_SIGN.search(text) or _FUNCTION.search(text) or not _FIRST_WORD.match(text):
        return None
    if any(max(len(left), len(right)) < 4 for left, right in _HYPHEN.findall(text)):
        return None
    return " ".join(text.casefold().split())
