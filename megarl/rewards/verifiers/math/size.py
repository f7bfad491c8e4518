"""How large the value of an expression may be, known before anything of it is computed.

A tower such as 9^{9^{9}} takes longer to evaluate than the universe has existed. What is too large is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.concrete.expr_with_limits import ExprWithLimits

MAX_DIGITS = 80_000  # of an exact number
MAX_EXPONENT = 9.0  # log10 of what may stand in an exponent at all
MAX_NODES = 1000
MAX_FACTORS = 3000  # of a product, of a sum that has no formula
LETTER_LOG, LETTER_DIGITS = 0.7, 5.0  # a letter stands for a number up to 5, of so many digits


class TooLarge(Exception):
    """The value takes more digits, or more work, than it is worth."""


@dataclass(frozen=True)
class Size:
    """Bounds of a value, decimal.

    log: of log10 |value|. digits: how many it takes to see the smallest and the largest number inside.
    """

    log: float
    digits: float


def size(expression: Any) -> Size:
    """Return bounds of an expression's value (letters count as numbers of a few digits). Raises TooLarge."""
    for count, _ in enumerate(sympy.preorder_traversal(expression)):
        if count > MAX_NODES:
            raise TooLarge("too many terms")
    return _size(expression, {})


def _size(node: Any, bound: dict[Any, Size]) -> Size:
    found = _bounds(node, bound)
    if found.log > MAX_DIGITS or found.digits > MAX_DIGITS:
        raise TooLarge("too many digits")
    return found


def _bounds(node: Any, bound: dict[Any, Size]) -> Size:
    if isinstance(node, sympy.Rational):
        top, bottom = math.log10(abs(node.p) + 1), math.log10(node.q)
        return Size(max(top - bottom, 0.0), top + bottom)
    if node.is_Symbol:
        return bound.get(node, Size(LETTER_LOG, LETTER_DIGITS))
    if node.is_Atom:
        return Size(1.0, 1.0)
    if isinstance(node, ExprWithLimits):
        return _with_limits(node, bound)
    sizes = [_size(argument, bound) for argument in node.args]
    logs, digits = [s.log for s in sizes], sum(s.digits for s in sizes)
    if node.is_Pow or isinstance(node, sympy.exp):
        base = sizes[0] if node.is_Pow else Size(0.5, 0.5)
        return _power(max(base.log, base.digits), sizes[-1].log, digits)
    if isinstance(node, (sympy.sinh, sympy.cosh, sympy.tanh, sympy.coth)):
        return _power(0.5, logs[0], digits)
    if node.is_Mul:
        return Size(sum(logs), digits)
    if node.is_Add:
        return Size(max(logs) + math.log10(len(logs)), digits)
    name = node.func.__name__
    if isinstance(node, sympy.binomial) or "binom" in name:
        return _factorials(min(logs[0], logs[1] + 0.5) if len(logs) == 2 else logs[0], logs[0], digits)
    if isinstance(node, (sympy.factorial, sympy.gamma)) or "Gamma" in name:
        return _factorials(logs[0], logs[0], digits)
    if isinstance(node, sympy.log):
        return Size(math.log10(3 * digits + 10), digits)
    return Size(max(logs, default=1.0), digits)


def _power(base: float, exponent: float, digits: float) -> Size:
    if exponent > MAX_EXPONENT:
        raise TooLarge("a tower of powers")
    log = base * 10.0**exponent
    return Size(log, digits + log)


def _factorials(count: float, of: float, digits: float) -> Size:
    """Return the size of a product of 10^count numbers, each up to 10^of."""
    if count > MAX_EXPONENT:
        raise TooLarge("a factorial")
    return Size(10.0**count * max(of, 1.0), digits + 10.0**count * max(of, 1.0))


def _with_limits(node: Any, bound: dict[Any, Size]) -> Size:
    """Bound a sum, product or integral by its terms; a long product is refused, a long sum may have a formula."""
    inner, terms, digits = dict(bound), 1.0, 0.0
    for variable, *ends in node.limits:
        sizes = [_size(end, inner) for end in ends]
        inner[variable] = Size(max([1.0, *(s.log for s in sizes)]), max([1.0, *(s.digits for s in sizes)]))
        digits += sum(s.digits for s in sizes)
        if len(ends) == 2 and all(end.is_finite for end in ends):
            length = _length(*ends)
            terms *= LETTER_DIGITS if length is None else max(length, 1.0)
    term = _size(node.function, inner)
    if isinstance(node, sympy.Product):
        if terms > MAX_FACTORS:
            raise TooLarge("a product of many factors")
        return Size(term.log * terms, term.digits + digits + term.log * terms)
    return Size(term.log + math.log10(terms), term.digits + digits)


def _length(first: Any, last: Any) -> float | None:
    """Return how many steps there are between two constants, None between others."""
    if first.free_symbols or last.free_symbols:
        return None
    return abs(float(sympy.N(last - first, 5)))
