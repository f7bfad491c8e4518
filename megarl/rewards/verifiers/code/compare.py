"""Whether a program's output is the expected one. Runs outside the sandbox, on plain text and plain JSON only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

How = Literal["lines", "tokens", "exact"]

SHOWN = 60  # characters of a value in a message
LONGEST_NUMBER = 400  # characters


@dataclass(frozen=True)
class Comparison:
    """The rules by which an output counts as the expected one.

    how: `lines` ignores white space around a line, its amount within one, and blank lines at the ends;
    `tokens` ignores all white space; `exact` ignores nothing.
    float_tolerance: absolute or relative, for two numbers of which at least one is written with a point or
        exponent. 0: equal by value ("1.0" is "1"); None: equal as text. Function results are always compared
        by value.
    """

    how: How = "lines"
    float_tolerance: float | None = 0.0
    ignore_case: bool = False

    def difference(self, expected: str, got: str) -> str | None:
        """Return None if equal under these rules, else where they part, for people."""
        if self.ignore_case:
            expected, got = expected.casefold(), got.casefold()
        if self.how == "exact":
            return None if expected == got else f"expected {_show(expected)}, got {_show(got)}"
        if self.how == "tokens":
            return self._tokens(expected.split(), got.split(), "token")
        wanted, given = _lines(expected), _lines(got)
        for number, (left, right) in enumerate(zip(wanted, given, strict=False), start=1):
            if left != right and self._tokens(left, right, "token") is not None:
                return f"line {number}: expected {_show(' '.join(left))}, got {_show(' '.join(right))}"
        return None if len(wanted) == len(given) else f"expected {len(wanted)} lines, got {len(given)}"

    def value_difference(self, expected: tuple[Any, ...], got: str) -> str | None:
        """Compare a function's result, as JSON text, with values of which it must equal one; see `difference`."""
        try:
            value = json.loads(got)
        except (ValueError, RecursionError) as error:
            return f"the result is no JSON: {error}"
        try:
            if any(self._equal(wanted, value) for wanted in expected):
                return None
        except RecursionError:
            return "the result is nested too deeply"
        return f"expected {_show(json.dumps(expected[-1]))}, got {_show(got)}"

    def _equal(self, expected: Any, got: Any) -> bool:
        """Compare values of JSON types. Numbers compare by value, True and False as Python has it (1 and 0)."""
        if isinstance(expected, list | tuple):
            return (
                isinstance(got, list)
                and len(expected) == len(got)
                and all(self._equal(left, right) for left, right in zip(expected, got, strict=True))
            )
        if isinstance(expected, dict):
            return (
                isinstance(got, dict)
                and {str(key) for key in expected} == got.keys()
                and all(self._equal(value, got[str(key)]) for key, value in expected.items())
            )
        if isinstance(expected, str) and isinstance(got, str) and self.ignore_case:
            return expected.casefold() == got.casefold()
        if isinstance(expected, int | float) and isinstance(got, int | float):
            return expected == got or self._close(expected, got)
        return type(expected) is type(got) and expected == got

    def _tokens(self, wanted: list[str], given: list[str], what: str) -> str | None:
        for number, (left, right) in enumerate(zip(wanted, given, strict=False), start=1):
            if left != right and not self._close_text(left, right):
                return f"{what} {number}: expected {_show(left)}, got {_show(right)}"
        return None if len(wanted) == len(given) else f"expected {len(wanted)} {what}s, got {len(given)}"

    def _close_text(self, left: str, right: str) -> bool:
        if self.float_tolerance is None or (_is_integer(left) and _is_integer(right)):
            return False
        first, second = _number(left), _number(right)
        if first is None or second is None:
            return False
        return first == second or self._close(float(first), float(second))

    def _close(self, left: float, right: float) -> bool:
        if not self.float_tolerance or (isinstance(left, int) and isinstance(right, int)):
            return False
        tolerance = self.float_tolerance
        try:
            return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # an integer beyond all floats
            return False


def _lines(text: str) -> list[list[str]]:
    """Return the words of each line, without blank lines at the beginning and the end."""
    return [line.split() for line in text.strip().split("\n")]


def _is_integer(text: str) -> bool:
    return text.lstrip("+-").isdecimal()


def _number(text: str) -> Decimal | None:
    """Return exactly the number a text writes; None for anything else, and for absurdly long ones."""
    if len(text) > LONGEST_NUMBER or "_" in text:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _show(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else repr(text[:SHOWN]) + "…"
