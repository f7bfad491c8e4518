"""Values of a row, checked: texts and answers, each with a reason where it is not one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.json_text import half_character
from megarl.errors import did_you_mean


class RowError(ValueError):
    """What is wrong with a row, in words that may follow "file, row N: "."""


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; a dotted name looks inside objects. Raises KeyError where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(column)
        value = value[part]
    return value


def pick(row: Mapping[str, Any], role: str, columns: Sequence[str]) -> tuple[str, Any]:
    """(column, value) of the first of these columns that the row has. Raises RowError if it has none."""
    for column in columns:
        try:
            return column, lookup(row, column)
        except KeyError:
            continue
    wanted = " or ".join(repr(c) for c in columns)
    hint = did_you_mean(columns[0], row)
    raise RowError(
        f"no column {wanted} (it has {', '.join(map(repr, row)) or 'none'}).{hint} Set columns.{role}"
    )


def text(value: Any, what: str) -> str:
    """Check and return a text, which must not be empty."""
    if not isinstance(value, str):
        raise RowError(f"{what} is {kind_of(value)}, not text")
    if not value.strip():
        raise RowError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character: "\\ud800"
        raise RowError(f"{what} is not valid Unicode: half a character at {error.start}") from None
    return value


def check_unicode(**held: Any) -> None:
    """Raise RowError where a value holds half a character: no tokenizer and no service could read it."""
    if (problem := half_character(held)) is not None:
        raise RowError(problem)


def answer(value: Any) -> Any:
    """Check and return an answer to compare with: a text, a finite number, or a list of them (any one is right)."""
    if isinstance(value, list | tuple):
        if not value:
            raise RowError("the answer is an empty list")
        return [answer(v) for v in value]
    if value is None:
        raise RowError("the answer is missing")
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise RowError(f"the answer is {value}")
        return value
    if isinstance(value, str) and value.strip().lower() == "nan":
        raise RowError("the answer is NaN")
    return text(value, "the answer")


def kind_of(value: Any) -> str:
    """Return what a value is, in words for a message."""
    if value is None:
        return "missing (null)"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    name = type(value).__name__
    return {"dict": "an object", "list": "a list", "str": "text", "int": "an integer"}.get(name, f"a {name}")


_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")


def after_hashes(value: Any) -> str:
    """GSM8K's final answer: what follows the last `####`, without thousands separators."""
    _, mark, final = text(value, "the answer").rpartition("####")
    if not mark:
        raise RowError("the answer has no '####' before its final number")
    return _THOUSANDS.sub("", text(final, "the answer behind '####'").strip())


def last_boxed(value: Any) -> str:
    r"""MATH's final answer: what the solution's last `\boxed{...}` (or `\fbox{...}`) holds."""
    solution = text(value, "the solution")
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        raise RowError(r"the solution has no \boxed answer")
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        return text(re.split(r"[\s$]", rest)[0], r"the \boxed answer")
    depth = 0
    for i, c in enumerate(rest):
        escaped = i > 0 and rest[i - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(c, 0)
        if depth == 0:
            return text(rest[1:i], r"the \boxed answer")
    raise RowError(r"the solution's last \boxed is not closed")
