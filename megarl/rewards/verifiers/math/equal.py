"""When two answers are the same: symmetric by construction. `Rules` says what `strict` and `lenient` mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megarl.rewards.verifiers.math.algebra import same_formula, value_of
from megarl.rewards.verifiers.math.answer import (
    Answer,
    Assignment,
    Formula,
    Inequality,
    Items,
    Matrix,
    Tuple,
    Union,
)
from megarl.rewards.verifiers.math.number import Number
from megarl.rewards.verifiers.math.units import changes_value

Percent = Literal["value", "number", "either"]
HALF = Fraction(1, 2)
MAX_BITS = 10_000  # a larger number equals no formula that is allowed to be evaluated
SIGNIFICANT = 3  # a decimal needs so many digits to count as the rounding of something


@dataclass(frozen=True)
class Rules:
    """What counts as the same.

    percent: what `50%` equals without a sign: 0.5 (`value`), 50 (`number`), or both.
    lenient: a decimal equals what it is the rounding of (three significant digits or more); variables in
    either case; a list for a tuple or an inequality for the interval it means; brackets of vectors; a lone
    element for its set.
    """

    percent: Percent = "value"
    lenient: bool = False


def same(a: Answer, b: Answer, rules: Rules) -> bool:
    """Return whether a and b say the same."""
    if a == b:
        return True
    if isinstance(a, Assignment) or isinstance(b, Assignment):
        return _same_assignment(a, b, rules) or _same_equation(a, b, rules)

    if isinstance(a, (Number, Formula)) and isinstance(b, (Number, Formula)):
        return _same_value(a, b, rules)
    if isinstance(a, Items) and isinstance(b, Items):
        return _same_items(a, b, rules)
    if isinstance(a, Tuple) and isinstance(b, Tuple):
        vectors = rules.lenient and len(a.parts) > 2
        return (vectors or (a.left, a.right) == (b.left, b.right)) and _in_order(a.parts, b.parts, rules)
    if isinstance(a, Union) and isinstance(b, Union):
        return _in_any_order(a.parts, b.parts, rules)
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        return len(a.rows) == len(b.rows) and all(
            _in_order(left, right, rules) for left, right in zip(a.rows, b.rows, strict=True)
        )
    if isinstance(a, Inequality) and isinstance(b, Inequality):
        return a.name == b.name and same(a.interval, b.interval, rules)
    return rules.lenient and (_same_in_spirit(a, b, rules) or _same_in_spirit(b, a, rules))


def _same_assignment(a: Answer, b: Answer, rules: Rules) -> bool:
    """`x = 5` is 5, but not `y = 5`. Each link of a chain must hold, so `7 = 12` is neither."""
    if isinstance(a, Assignment) and isinstance(b, Assignment):
        if a.name and b.name and a.name != b.name:
            return False
        return all(same(x, y, rules) for x in a.values for y in b.values)
    chain, other = (a, b) if isinstance(a, Assignment) else (b, a)
    assert isinstance(chain, Assignment)
    return all(same(value, other, rules) for value in chain.values)


def _same_equation(a: Answer, b: Answer, rules: Rules) -> bool:
    """`y = 2x + 1` is `2x - y + 1 = 0`: the same line, whichever letter stands alone."""
    left, right = _equation(a), _equation(b)
    return bool(left and right) and same_formula(left, right, ignore_case=rules.lenient)


def _equation(answer: Answer) -> str:
    if isinstance(answer, Assignment):
        return answer.equation
    return answer.latex if isinstance(answer, Formula) and "=" in answer.latex and not answer.unit else ""


def _same_items(a: Items, b: Items, rules: Rules) -> bool:
    """Compare without order. A set's repetitions count once; a list's count."""
    if a.braces or b.braces:  # each has everything of the other; ends at the first stranger
        return _within(a.parts, b.parts, rules) and _within(b.parts, a.parts, rules)
    return _in_any_order(a.parts, b.parts, rules)


def _same_in_spirit(a: Answer, b: Answer, rules: Rules) -> bool:
    """Return whether one is another notation for the other; for lenient rules only."""
    if isinstance(a, Items):
        if isinstance(b, Tuple):
            return not a.braces and _in_order(a.parts, b.parts, rules)
        if isinstance(b, Union):
            return _in_any_order(a.parts, b.parts, rules)
        return len(a.parts) == 1 and same(a.parts[0], b, rules)
    if isinstance(a, Inequality):
        return isinstance(b, Tuple) and same(a.interval, b, rules)
    if isinstance(a, Matrix) and isinstance(b, Tuple):
        row = a.rows[0] if len(a.rows) == 1 else tuple(r[0] for r in a.rows if len(r) == 1)
        return len(row) == max(len(a.rows), len(a.rows[0])) and _in_order(row, b.parts, rules)
    return False


def _in_order(left: Sequence[Answer], right: Sequence[Answer], rules: Rules) -> bool:
    return len(left) == len(right) and all(same(x, y, rules) for x, y in zip(left, right, strict=True))


def _in_any_order(left: Sequence[Answer], right: Sequence[Answer], rules: Rules) -> bool:
    """Pair each of one side with one of the other (greedily: sameness is as good as transitive here)."""
    if len(left) != len(right):
        return False
    open_right = list(right)
    for x in left:
        partner = next((index for index, y in enumerate(open_right) if same(x, y, rules)), None)
        if partner is None:
            return False
        del open_right[partner]
    return True


def _within(parts: Sequence[Answer], others: Sequence[Answer], rules: Rules) -> bool:
    return all(any(same(part, other, rules) for other in others) for part in parts)


def _same_value(a: Number | Formula, b: Number | Formula, rules: Rules) -> bool:
    """Compare numbers and formulas: units where both give one, percent signs as configured, then the values."""
    if a.unit != b.unit and ((a.unit and b.unit) or changes_value(a.unit or b.unit)):
        return False
    if a.percent == b.percent:
        return _equal(a, b, 1, rules)
    signed, plain = (a, b) if a.percent else (b, a)
    scales = {"value": (100,), "number": (1,), "either": (100, 1)}[rules.percent]
    return any(_equal(signed, plain, scale, rules) for scale in scales)


def _equal(a: Number | Formula, b: Number | Formula, scale: int, rules: Rules) -> bool:
    """Return whether a / scale equals b."""
    if isinstance(a, Number) and isinstance(b, Number):
        value = a.value / scale
        return value == b.value or (rules.lenient and (_rounds(value, b, 1) or _rounds(b.value, a, scale)))
    if any(isinstance(x, Number) and x.value.numerator.bit_length() > MAX_BITS for x in (a, b)):
        return False
    left = _latex(a) if scale == 1 else rf"\frac{{{_latex(a)}}}{{{scale}}}"
    if same_formula(left, _latex(b), ignore_case=rules.lenient):
        return True
    if not rules.lenient or isinstance(a, Formula) == isinstance(b, Formula):
        return False
    number, formula, scale = (b, left, 1) if isinstance(b, Number) else (a, _latex(b), scale)
    assert isinstance(number, Number)
    exact = value_of(formula, number.significant) if number.decimals is not None else None
    return exact is not None and _rounds(exact, number, scale)


def _rounds(value: Fraction, decimal: Number, scale: int) -> bool:
    """Return whether `value` rounds to `decimal / scale`, as far as its digits go."""
    if decimal.decimals is None or decimal.significant < SIGNIFICANT:
        return False
    return abs(value * scale - decimal.value) <= HALF / 10**decimal.decimals


def _latex(answer: Number | Formula) -> str:
    if isinstance(answer, Formula):
        return answer.latex
    value = answer.value
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
