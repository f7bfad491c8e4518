"""Where the final answer of a response is. The whole text never goes to the grader.

Rules: thinking blocks are ignored; the last closed `\\boxed{...}` or `\\fbox{...}` wins, so an unclosed box
(a truncated response) doesn't hide an earlier one; an empty box is an empty answer, not "no answer"; without
a box, only the forms that are asked for count. Every scan is linear in the text.
"""

from __future__ import annotations

import re
from typing import Literal

from megarl.rewards.extraction import last_box

Form = Literal["boxed", "answer_line", "hashes"]

# What comes before the answer; possessive, so that no run of blanks is tried twice.
_ANSWER_LINE = re.compile(
    r"(?:^[ \t>*_#-]*+(?:the[ \t]++)?(?:final[ \t]++)?answer[ \t*_]*+(?:is[ \t*_]*+:?|:)"
    r"|\bthe[ \t]++(?:final[ \t]++|correct[ \t]++)?answer[ \t]++is[ \t*_]*+:?)",
    re.IGNORECASE | re.MULTILINE,
)
_HASHES = re.compile(r"^####", re.MULTILINE)
_SENTENCE_END = re.compile(r"\.(?=\s|\Z)")


def final_answer(text: str, forms: tuple[Form, ...]) -> str | None:
    """Return the final answer in the first of `forms` that the text has, the last of its kind, or None.

    text: without thinking and end-of-sequence strings (see `visible`).
    """
    for form in forms:
        if form == "boxed":
            found = last_box(text)
        else:
            found = _after_last(_ANSWER_LINE if form == "answer_line" else _HASHES, text)
        if found is not None:
            return found
    return None


def _after_last(prefix: re.Pattern[str], text: str) -> str | None:
    """Return the rest of the line (to the end of its sentence) behind the last match that has one."""
    for match in reversed(list(prefix.finditer(text))):
        end = text.find("\n", match.end())
        line = text[match.end() : end if end >= 0 else len(text)].strip(" \t*_`")
        if line:
            box = last_box(line)
            return _SENTENCE_END.split(line, 1)[0].strip(" \t*_`") if box is None else box
    return None
