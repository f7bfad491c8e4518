"""Finding the answer in a response: thinking and end-of-sequence strings apart, then by a named convention.

Every scan is linear in the text, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from megarl.rewards.contract import Response

Extract = Literal["whole", "boxed", "tag", "marker", "auto"]

THINK = ("<think>", "</think>")
EOS_STRINGS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "[EOS]",
)

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?\d[\d.,/]*|[A-Za-z](?![A-Za-z])")


def answer_part(
    response: Response, *, think: tuple[str, str] = THINK, eos: tuple[str, ...] = EOS_STRINGS
) -> str:
    """Return the response without thinking blocks and the end-of-sequence strings at its end.

    The prompt may have opened the thinking; an unclosed block reaches to the end of the text.
    """
    text, (start, end) = response.text, think
    before, closed, after = text.partition(end)
    if response.prompt.rstrip().endswith(start) or (closed and start not in before):
        text = after  # it began inside the thinking
    block = re.compile(rf"{re.escape(start)}.*?(?:{re.escape(end)}|\Z)", re.DOTALL)
    return strip_eos(block.sub(" ", text), eos)


def extract(text: str, how: Extract, *, marker: str, tag: str) -> str | None:
    """Return the answer, stripped; None where the convention isn't met.

    whole: the text. boxed: the last closed box. tag: inside the last closed `<tag>...</tag>`. marker: the
    rest of the line after the last `marker`. auto: the first of tag, boxed, marker, whole that is there.
    """
    if how == "auto":
        found = (extract(text, each, marker=marker, tag=tag) for each in ("tag", "boxed", "marker", "whole"))
        return next(answer for answer in found if answer is not None)
    if how == "whole":
        return text.strip()
    if how == "boxed":
        box = last_box(text)
        return None if box is None else box.strip()
    if how == "marker":
        _before, found_marker, after = text.rpartition(marker)
        return after.strip().partition("\n")[0].strip() if found_marker else None
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def last_box(text: str) -> str | None:
    """Return the content of the last closed box that is not itself inside a closed box; None where there is none.

    >>> last_box(r"\\boxed{4} so \\boxed{\\frac{1}{2}} and \\boxed{5")
    '\\\\frac{1}{2}'
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    closing = _matching_braces(text, starts[0].start())
    found, found_end = None, -1
    for start in starts:
        position = start.end()
        if position < found_end:
            continue  # nested in the box before it
        if position in closing:
            found, found_end = text[position + 1 : closing[position]], closing[position]
        elif position < len(text) and text[position] != "{" and (bare := _BARE.match(text, position)):
            found, found_end = bare.group().rstrip(".,"), bare.end()  # \boxed 5, as TeX allows
    return found


def last_code_block(text: str, labels: Sequence[str]) -> str | None:
    """Return the last closed fenced block (CommonMark's rules) with one of these labels or none, or None.

    A block that is opened and never closed does not hide an earlier one.
    """
    found = fence = None
    wanted, lines = False, list[str]()
    for line in text.splitlines(keepends=True):
        match = re.match(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*$", line.rstrip("\r\n"))
        if fence is None:
            if match:
                fence, lines = match[1], []
                wanted = not match[2] or match[2].lower().strip("{}.") in labels
        elif match and match[1].startswith(fence) and line.strip() == match[1]:
            if wanted:
                found = "".join(lines)
            fence = None
        else:
            lines.append(line)
    return found


def strip_eos(text: str, eos: tuple[str, ...]) -> str:
    """Return `text` without these strings, however many, and white space at its end."""
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        length = next((len(string) for string in eos if string and text.endswith(string, 0, end)), 0)
        if not length:
            return text[:end]
        end -= length


def _matching_braces(text: str, start: int) -> dict[int, int]:
    """Return where each `{` from `start` on has its `}`; braces escaped by a backslash don't count."""
    stack: list[int] = []
    closing = {}
    for match in _BRACES.finditer(text, start):
        if match.group() == "{":
            stack.append(match.start())
        elif match.group() == "}" and stack:
            closing[stack.pop()] = match.start()
    return closing
