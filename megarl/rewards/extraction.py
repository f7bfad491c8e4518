"""Finding the answer in a response: thinking and end-of-sequence strings apart, then by a named convention.

Every scan is linear in the text, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator

from megarl.rewards.contract import Response

Extract = Literal["whole", "boxed", "tag", "marker", "auto"]


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


def _name(tag: str) -> str:
    if not re.fullmatch(r"[^\s<>/]+", tag):
        raise ValueError("a tag's name is needed, without brackets and blanks")
    return tag


def _different(tags: tuple[str, str]) -> tuple[str, str]:
    if tags[0] == tags[1]:
        raise ValueError("the tag that opens is the one that closes")
    return tags


# Types of verifiers' options.
Text = Annotated[str, AfterValidator(_filled)]
TagName = Annotated[str, AfterValidator(_name)]
Tags = Annotated[tuple[Text, Text], AfterValidator(_different)]

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
# Between two boxes of one list: signs of spacing and formulas, and a comma, "and" or "or".
_GAP = r"(?:\s|\$|~|\\[()\[\],;:! ]|\\q?quad(?![a-zA-Z]))*+"
_WORD = r"(?:\\text\s*\{\s*,?\s*)?\b(and|or)\b\s*\}?"
_JOINT = re.compile(rf"{_GAP}(?:[,;]{_GAP}(?:{_WORD})?|{_WORD}){_GAP}")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
# What may stand before a fence: blanks, and the marks of quotations and lists.
_FENCE = re.compile(r"((?:[ \t]|>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t]))*)(`{3,}|~{3,})([^\n]*)")
_LABEL = re.compile(r"[\s\[({<.]*(?:lang(?:uage)?-)?([\w+#-]+)")
_ATTRIBUTE = re.compile(r"\s*\{[^}.]*\.([\w+#-]+)")
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
    """Return the answer, stripped; None where the convention isn't met, or what it found is empty.

    whole: the text ("" for an empty one). boxed: the last closed box. tag: inside the last closed `<tag>...</tag>`.
    marker: the rest of the line after the last `marker`, or the next line with something in it. auto: the first of
    tag, boxed, marker, whole that is there. Nothing behind the last marker (a response that was cut off) is no answer,
    whatever an earlier one says.
    """
    if how == "whole":
        return text.strip()
    ways: tuple[Extract, ...] = ("tag", "boxed", "marker") if how == "auto" else (how,)
    found = (_found(text, way, marker=marker.strip(), tag=tag) for way in ways)
    answer = next((answer for answer in found if answer is not None), text if how == "auto" else "")
    return answer.strip() or None


def _found(text: str, how: Extract, *, marker: str, tag: str) -> str | None:
    if how == "boxed":
        return last_box(text)
    if how == "marker":
        _before, found_marker, after = text.rpartition(marker)
        return after.strip().partition("\n")[0] if found_marker else None
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def last_box(text: str) -> str | None:
    """Return the content of the last closed box that is not itself inside a closed box; None where there is none.

    >>> last_box(r"\\boxed{4} so \\boxed{\\frac{1}{2}} and \\boxed{5")
    '\\\\frac{1}{2}'
    """
    boxes = _boxes(text)
    return boxes[-1][0] if boxes else None


def last_boxes(text: str) -> str | None:
    """Return the last box, or the list it makes with those joined to it by a comma, "and" or "or"; None without a box.

    >>> last_boxes(r"\\boxed{1}. So \\boxed{2}, $\\boxed{3}$ and \\boxed{4}")
    '2, 3 and 4'
    >>> last_boxes(r"\\boxed{5} or \\boxed{5}")
    '5'
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    last, following = boxes[-1][0], boxes[-1]
    pieces, contents = [last], {last}
    for box in reversed(boxes[:-1]):
        joint = _JOINT.fullmatch(text, box[2], following[1])
        if joint is None or not last.strip():
            break
        word = joint[1] or joint[2]
        pieces.append(f"{box[0]} {word} " if word else f"{box[0]}, ")
        contents.add(box[0])
        following = box
    return "".join(reversed(pieces)) if len(contents) > 1 else last


def _boxes(text: str) -> list[tuple[str, int, int]]:
    """Return content, start and end of every closed box that is not itself inside one."""
    starts = list(_BOX.finditer(text))
    closing = _matching_braces(text, starts[0].start()) if starts else {}
    found = list[tuple[str, int, int]]()
    for start in starts:
        position = start.end()
        if found and position < found[-1][2]:
            continue  # nested in the box before it
        if position in closing:
            end = closing[position]
            found.append((text[position + 1 : end], start.start(), end + 1))
        elif position < len(text) and text[position] != "{" and (bare := _BARE.match(text, position)):
            content = bare.group().rstrip(".,")
            found.append((content, start.start(), position + len(content)))  # \boxed 5, as TeX allows
    return found


def last_code_block(text: str, labels: Sequence[str], *, labelled_first: bool = True) -> str | None:
    """Return the last closed fenced block with one of these labels; without one, the last that has no label; or None.

    labelled_first: False takes the last of both, as one without a label may mend the one before it, or show its output.
    A fence may be indented, as in a list, or quoted; what stands before it is taken from each line of the block. One
    that closes the block is at most three columns further in than the one that opened it (CommonMark's rule), so that
    fences in a docstring close nothing. A block that is opened and never closed does not hide an earlier one.
    """
    found: dict[bool, str] = {}  # by whether it goes before the others
    fence, label, before, lines = "", "", "", list[str]()
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        if not fence:
            match = _FENCE.match(line)
            if match and not (match[2][0] == "`" and "`" in match[3]):
                before, fence, label, lines = match[1], match[2], _label(match[3]), []
            continue
        line = _without(line, before)
        closing = line.strip()
        indented = line.expandtabs(4).startswith("    ")
        if closing.startswith(fence) and not closing.strip(fence[0]) and not indented:
            if not label or label in labels:
                found[bool(label) and labelled_first] = "".join(lines)
            fence = ""
        else:
            lines.append(line)
    return found.get(True, found.get(False))


def _label(info: str) -> str:
    """Return the language that stands after a fence: `py title="x"`, `{.python}`, `python3.11`, `language-python`."""
    match = _ATTRIBUTE.match(info.lower()) or _LABEL.match(info.lower())
    return match[1] if match else ""


def _without(line: str, before: str) -> str:
    """Return a line of a block without what stands before the fence: as many quotation marks and columns."""
    *quotes, blanks = before.split(">")
    for _ in quotes:
        line = re.sub(r"^[ \t]*>", "", line)
    width, column, end = len(blanks.expandtabs(4)), 0, 0
    while column < width and line[end : end + 1] in (" ", "\t"):
        column += 4 - column % 4 if line[end] == "\t" else 1
        end += 1
    return line[end:]


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
