"""When two answers are the same: symmetric by construction. `Rules` says what `strict` and `lenient` mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megarl.rewards.verifiers.math.algebra import is_number, same_formula, value_of
from megarl.rewards.verifiers.math.answer import (
    Answer,
    Assignment,
    Congruence,
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
SIGNIFICANT = 3  # a decimal needs so many digits to count as the rounding of something
FLOAT_DIGITS = (15, 17)  # what a program prints of a float
SHORT = 12  # digits of a decimal that is meant exactly


@dataclass(frozen=True)
class Rules:
    """What counts as the same.

    percent: what `50%` equals without a sign: 0.5 (`value`), 50 (`number`), or both.
    lenient: a decimal equals what it is the rounding of (three significant digits or more); variables in
    either case; a list for a tuple or an inequality for the interval it means; brackets of vectors; a lone
    element for its set.
    """

    percent: Percent = "either"
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
    if isinstance(a, Congruence) or isinstance(b, Congruence):
        return _same_congruence(a, b, rules)
    if isinstance(a, Inequality) and isinstance(b, Inequality) and a.name == b.name:
        return same(a.interval, b.interval, rules) or _same_latex(a, b, rules)
    if isinstance(a, (Inequality, Matrix)) and isinstance(b, Formula):
        return _same_latex(a, b, rules)
    if isinstance(b, (Inequality, Matrix)) and isinstance(a, Formula):
        return _same_latex(a, b, rules)
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


def _same_congruence(a: Answer, b: Answer, rules: Rules) -> bool:
    """`2 \\pmod 5` is `7 \\pmod 5`, and 2 where only what is left over is asked for."""
    if isinstance(a, Congruence) and isinstance(b, Congruence):
        if (a.name and b.name and a.name != b.name) or not same(a.modulus, b.modulus, rules):
            return False
        numbers = [x for x in (a.value, b.value, a.modulus) if isinstance(x, Number)]
        if len(numbers) == 3 and numbers[2].value:
            return (numbers[0].value - numbers[1].value) % numbers[2].value == 0
        return same(a.value, b.value, rules)
    value, other = (a.value, b) if isinstance(a, Congruence) else (b, a)
    return same(value.value if isinstance(value, Congruence) else value, other, rules)


def _same_latex(a: Inequality | Matrix | Formula, b: Inequality | Matrix | Formula, rules: Rules) -> bool:
    return same_formula(a.latex, b.latex, ignore_case=rules.lenient)


def _same_equation(a: Answer, b: Answer, rules: Rules) -> bool:
    """`y = 2x + 1` is `2x - y + 1 = 0`: the same line, whichever letter stands alone."""
    left, right = _equation(a), _equation(b)
    return bool(left and right) and same_formula(left, right, ignore_case=rules.lenient)


def _equation(answer: Answer) -> str:
    if isinstance(answer, Assignment):
        return answer.equation
    return answer.latex if isinstance(answer, Formula) and "=" in answer.latex and not answer.unit else ""


def _same_items(a: Items, b: Items, rules: Rules) -> bool:
    """Compare without order. A set's repetitions count once; a list's count. `x = 3, y = 4` is 3, 4 in this order."""
    if a.joint and b.joint and a.joint != b.joint:
        return False
    if _quantities(a) != _quantities(b):
        return _in_order(a.parts, b.parts, rules)
    if a.braces or b.braces:  # each has everything of the other; ends at the first stranger
        return _within(a.parts, b.parts, rules) and _within(b.parts, a.parts, rules)
    return _in_any_order(a.parts, b.parts, rules)


def _quantities(items: Items) -> bool:
    """Return whether the parts are values of different quantities, and not the roots of one equation (x_1, x_2)."""
    names = [
        part.name.partition("_")[0] for part in items.parts if isinstance(part, Assignment) and part.name
    ]
    return len(names) == len(items.parts) and len(set(names)) > 1


def _same_in_spirit(a: Answer, b: Answer, rules: Rules) -> bool:
    """Return whether one is another notation for the other; for lenient rules only."""
    if isinstance(a, Items):
        if isinstance(b, Tuple):
            return not a.braces and b.left in ("(", "[") and _in_order(a.parts, b.parts, rules)
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
        if value == b.value or _computed(value, a, b) or _computed(b.value * scale, b, a):
            return True
        return rules.lenient and (_rounds(value, b, 1) or _rounds(b.value, a, scale))
    if isinstance(a, Formula) and isinstance(b, Formula):
        left = a.latex if scale == 1 else rf"\frac{{{a.latex}}}{{{scale}}}"
        return same_formula(left, b.latex, ignore_case=rules.lenient)
    if isinstance(b, Number):
        assert isinstance(a, Formula)
        number, formula, scale = b, a.latex if scale == 1 else rf"\frac{{{a.latex}}}{{{scale}}}", 1
    else:
        assert isinstance(a, Number)
        number, formula = a, b.latex
    if is_number(formula, number.value / scale):
        return True
    if number.decimals is None or number.significant < (SIGNIFICANT if rules.lenient else FLOAT_DIGITS[0]):
        return False
    exact = value_of(formula, number.significant + 20)
    if exact is None:
        return False
    return _computed(exact * scale, None, number) or (rules.lenient and _rounds(exact, number, scale))


def _computed(exact: Fraction, written: Number | None, decimal: Number) -> bool:
    """Return whether `decimal` is what a program that computes with floats prints for `exact`.

    It has 15 to 17 digits: those of the nearest float, or a correct rounding; or those of a neighbor, where they
    are 17 or the exact value is a short decimal (0.1 + 0.2 prints 0.30000000000000004). Integers come out exactly.
    """
    if decimal.decimals is None or not FLOAT_DIGITS[0] <= decimal.significant <= FLOAT_DIGITS[1]:
        return False
    short = written is not None and written.decimals is not None
    if (short and written is not None and written.significant > SHORT) or exact.denominator == 1:
        return False
    try:
        nearest = float(exact)
    except OverflowError:
        return False
    if not nearest or abs(exact - decimal.value) > abs(exact) / 10**14:
        return False
    if _printed(nearest) == decimal.value or _rounds(exact, decimal, 1):
        return True
    neighbors = [_printed(math.nextafter(nearest, side)) for side in (-math.inf, math.inf)]
    return (short or decimal.significant == FLOAT_DIGITS[1]) and decimal.value in neighbors


def _printed(number: float) -> Fraction:
    return Fraction(repr(number))


def _rounds(value: Fraction, decimal: Number, scale: int) -> bool:
    """Return whether `value` rounds to `decimal / scale`, as far as its digits go."""
    if decimal.decimals is None or decimal.significant < SIGNIFICANT:
        return False
    return abs(value * scale - decimal.value) <= HALF / 10**decimal.decimals
