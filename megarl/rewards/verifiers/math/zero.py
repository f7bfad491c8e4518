"""Whether two expressions are equal, decided by exact arithmetic or by digits enough, never by a tolerance.

A constant is zero if it is the rational number 0, or if it has no digit where the numbers in it would leave one:
the precision grows with the sizes of those numbers, so 1 - e^-2000 and 1 - e^-2001 differ. A formula with letters is
compared where the letters are numbers: small and large ones, of both signs. An identity holds at all of these points;
anything else fails at the first or second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef

from megarl.rewards.verifiers.math.size import TooLarge, size

SURE, SPARE = 45, 25  # decimal places: a number below 10^-(SURE + its digits) is zero; SPARE are rounded away
MAX_PRECISION, MAX_PRECISION_AT_POINTS = 20_000, 2_000
APPROXIMATE = sympy.Rational(1, 10**20)  # where a sum or an integral has no closed form
POINTS = 8
COUNTING = (sympy.factorial, sympy.binomial, sympy.gamma, sympy.RisingFactorial, sympy.FallingFactorial)


def equal(a: Any, b: Any) -> bool:
    """Return whether two expressions (evaluated, exact) are equal. Raises TooLarge where that cannot be computed."""
    if a == b:
        return not a.has(sympy.nan, sympy.zoo)
    if not (_is_plain(a) and _is_plain(b)):
        return False
    return vanishes([(a, b)])


def proportional(a: Any, b: Any, *, positive: bool = False) -> bool:
    """Return whether a = c * b for a constant c that is not zero (positive: above zero), and neither vanishes."""
    if not (_is_plain(a) and _is_plain(b)):
        return False
    a, b = _with_letters(a), _with_letters(b)
    for point in _points(a.free_symbols | b.free_symbols):
        at_a, at_b = _at(a, point), _at(b, point)
        if not (_is_plain(at_a) and _is_plain(at_b)):
            continue
        zero_a, zero_b = is_zero(at_a), is_zero(at_b)
        if zero_a != zero_b:
            return False
        if not zero_a:
            if positive and not _is_positive(at_a * at_b):
                return False
            return vanishes([(a * at_b, b * at_a)])
    return False


def vanishes(pairs: list[tuple[Any, Any]]) -> bool:
    """Return whether both of each pair are equal for all values of their letters."""
    return all(_agree(_with_letters(a), _with_letters(b)) for a, b in pairs)


def is_zero(constant: Any, *, at_most: int = MAX_PRECISION) -> bool:
    """Return whether a constant is zero. Raises TooLarge if that takes more than so many digits."""
    if constant.is_Rational:
        return bool(constant == 0)
    if constant.has(ExprWithLimits, sympy.Limit):
        return _is_nearly_zero(constant)
    bounds = size(constant)
    places = SURE + int(bounds.digits)
    digits = places + SPARE + int(bounds.log)
    if digits > at_most:
        raise TooLarge("too many digits to tell two values apart")
    parts = sympy.N(constant, digits, maxn=digits).as_real_imag()
    if not all(part.is_number and (part.is_Float or part.is_Rational) for part in parts):
        raise TooLarge("no number")
    return all(abs(part) < sympy.Float(f"1e-{places}", 15) for part in parts)


def _agree(a: Any, b: Any) -> bool:
    difference = a - b
    symbols = difference.free_symbols
    if not symbols:
        return _is_plain(difference) and is_zero(difference)
    imaginary = difference.has(sympy.I)
    met = 0
    for point in _points(symbols, whole=difference.has(*COUNTING)):
        here = _at(difference, point)
        try:
            if not _is_plain(here):
                continue  # a pole, at most
            if is_zero(here, at_most=MAX_PRECISION_AT_POINTS):
                met += 1
            elif imaginary or _is_real(_at(a, point)) or _is_real(_at(b, point)):
                return False  # the point lies in the domain of one of them
        except TooLarge:
            continue
    return met > 0


def _points(symbols: set[Any], *, whole: bool = False) -> Iterator[dict[Any, Any]]:
    """Yield values of the letters: positive ones first, then of both signs, near zero and far from it.

    whole: positive integers, mostly growing with the alphabet (k of n).
    """
    ordered = sorted(symbols, key=str)
    if not ordered:
        yield {}
        return
    if whole:
        yield from (
            {symbol: sympy.Integer(1 + n + (3 + n % 3) * index) for index, symbol in enumerate(ordered)}
            for n in range(POINTS)
        )
        return
    for number in range(POINTS):
        scale = sympy.Rational([1, 1, 1, 13, 1, 1, 997, 9973][number], [1, 1, 1, 1, 89, 7, 1, 1][number])
        yield {
            symbol: scale
            * sympy.Rational(7 + 4 * index + 6 * number, 11 + index + 2 * number)
            * (-1 if number % 2 and (index + number // 2) % 2 == 0 else 1)
            for index, symbol in enumerate(ordered)
        }


def _with_letters(expression: Any) -> Any:
    """Put a letter for each value of an unknown function: f(2) is only itself."""
    unknown = expression.atoms(AppliedUndef)
    return (
        expression.xreplace({f: sympy.Symbol(str(f), real=True) for f in unknown}) if unknown else expression
    )


def _is_plain(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.has(
        sympy.nan, sympy.zoo, sympy.oo, -sympy.oo
    )


def _is_nearly_zero(constant: Any) -> bool:
    value = sympy.N(constant, 30)
    parts = [abs(part) for term in sympy.Add.make_args(constant) for part in [sympy.N(term, 30)]]
    return bool(abs(value) <= APPROXIMATE * max(parts))


def _at(expression: Any, point: dict[Any, Any]) -> Any:
    bound = expression.has(ExprWithLimits, sympy.Limit, sympy.Derivative)  # their own letters stay
    return expression.subs(point) if bound else expression.xreplace(point)


def _is_real(constant: Any) -> bool:
    return bool(constant.is_real) or bool(abs(sympy.N(constant, 15).as_real_imag()[1]) < 1e-9)


def _is_positive(constant: Any) -> bool:
    return bool(sympy.N(constant, 15) > 0)
