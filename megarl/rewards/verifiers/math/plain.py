r"""Plain formulas, decided exactly and without computer algebra: sums, products, whole powers, quotients and
square roots of numbers and letters.

Each becomes its canonical form: a sum of terms, each a fraction times a product of distinct square roots of
primes (and i) times powers of letters. Square roots of distinct primes, i and their products are linearly
independent over the rationals, so two plain formulas are equal if and only if these forms are. Parsing one
takes a tenth of a millisecond, where a LaTeX grammar and sympy take several.

Whatever is ambiguous or outside (`1/2x`, `x(y)`, `x2`, functions, roots of letters, large powers) is not
plain: `read_plain` says None, and computer algebra decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fractions import Fraction

# (roots, powers): roots as a sorted tuple of primes, -1 for i; powers as sorted (letter, exponent) pairs.
Monomial = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]
Plain = Mapping[Monomial, Fraction]

MAX_CHARACTERS = 200
MAX_DEPTH = 12
MAX_TERMS = 64
MAX_POWER = 16
MAX_BITS = 2048
MAX_ROOT = 10**6

_ONE: Monomial = ((), ())
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<command>\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z]))|(?P<sign>[-+*/^(){}])"
    r"|(?P<letter>[a-zA-Z])"
)
_SPACE = re.compile(r"\s*")
_AMBIGUOUS = frozenset("dEI")  # a differential; letters that some read as constants
_STARTS_FACTOR = frozenset(("(", "{", r"\frac", r"\sqrt", r"\pi"))


class _NotPlain(Exception):
    """Somebody else must read it."""


@functools.lru_cache(maxsize=8192)
def read_plain(latex: str) -> Plain | None:
    """The canonical form; None for what is not plain."""
    if len(latex) > MAX_CHARACTERS:
        return None
    try:
        reader = _Reader(_tokens(latex))
        value = reader.sum(0)
        return value if reader.at == len(reader.tokens) else None
    except (_NotPlain, ZeroDivisionError):
        return None


def _tokens(latex: str) -> list[str]:
    found, position = list[str](), _SPACE.match(latex).end()  # type: ignore[union-attr]
    while position < len(latex):
        match = _TOKEN.match(latex, position)
        if match is None or match["letter"] in _AMBIGUOUS:
            raise _NotPlain
        found.append(match.group())
        position = _SPACE.match(latex, match.end()).end()  # type: ignore[union-attr]
    return found


class _Reader:
    """Recursive descent; each method returns the value of what it has read."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str) -> bool:
        taken = self.next == token
        self.at += taken
        return taken

    def sum(self, depth: int) -> Plain:
        if depth > MAX_DEPTH:
            raise _NotPlain
        total: Plain = {}
        sign = -1 if self.take("-") else 1
        if sign == 1:
            self.take("+")
        while True:
            total = _add(total, self.product(depth), sign)
            if self.take("+"):
                sign = 1
            elif self.take("-"):
                sign = -1
            else:
                return total

    def product(self, depth: int) -> Plain:
        value = self.power(depth)
        divided = False
        while True:
            before = self.tokens[self.at - 1]
            if self.next in ("*", r"\cdot", r"\times"):
                self.at += 1
                value = _multiply(value, self.power(depth))
            elif self.take("/"):
                value = _multiply(value, _inverse(self.power(depth)))
                divided = True
            elif self._side_by_side(before):
                if divided:
                    raise _NotPlain  # 1/2x
                value = _multiply(value, self.power(depth))
            else:
                return value

    def _side_by_side(self, before: str) -> bool:
        """Whether a factor follows without a sign; _NotPlain where readers differ about what that means."""
        after = self.next
        if after[:1].isdigit() or (before.isalpha() and after == "("):
            raise _NotPlain  # x2, (x)2; f(x)
        if before[0].isdigit() and after == r"\frac":
            raise _NotPlain  # a mixed number
        return after.isalpha() or after in _STARTS_FACTOR

    def power(self, depth: int) -> Plain:
        value = self.base(depth)
        if not self.take("^"):
            return value
        if self.take("{"):
            exponent = self._closed("}", depth)
        elif len(self.next) == 1 and self.next.isdecimal():  # TeX: x^12 is x^1 2
            exponent = {_ONE: Fraction(int(self.next))} if self.next != "0" else {}
            self.at += 1
        else:
            raise _NotPlain
        if self.next == "^":
            raise _NotPlain
        whole = _rational(exponent)
        if whole is None or whole.denominator != 1 or abs(whole) > MAX_POWER:
            raise _NotPlain
        if whole <= 0 and not value:
            raise _NotPlain  # 0^0
        return _to_the(value, int(whole))

    def base(self, depth: int) -> Plain:
        token = self.next
        self.at += 1
        if token[:1].isdigit():
            return _number(Fraction(token))
        if token == "i":
            return {((-1,), ()): Fraction(1)}
        if token.isalpha() or token == r"\pi":
            return {((), ((token, 1),)): Fraction(1)}
        if token in ("(", "{"):
            return self._closed(")" if token == "(" else "}", depth)
        if token == r"\frac":
            return _multiply(self._group(depth), _inverse(self._group(depth)))
        if token == r"\sqrt":
            return _root(self._group(depth))
        raise _NotPlain

    def _group(self, depth: int) -> Plain:
        if not self.take("{"):
            raise _NotPlain
        return self._closed("}", depth)

    def _closed(self, closing: str, depth: int) -> Plain:
        value = self.sum(depth + 1)
        if not self.take(closing):
            raise _NotPlain
        return value


def _number(value: Fraction) -> Plain:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise _NotPlain
    return {_ONE: value} if value else {}


def _rational(value: Plain) -> Fraction | None:
    """The fraction that it is; None if it holds a root or a letter."""
    return value.get(_ONE, Fraction(0)) if value.keys() <= {_ONE} else None


def _add(a: Plain, b: Plain, sign: int) -> Plain:
    total = dict(a)
    for monomial, coefficient in b.items():
        value = total.get(monomial, Fraction(0)) + sign * coefficient
        if value:
            total[monomial] = value
        else:
            total.pop(monomial, None)
    return _bounded(total)


def _multiply(a: Plain, b: Plain) -> Plain:
    if len(a) * len(b) > 4 * MAX_TERMS:
        raise _NotPlain
    total: dict[Monomial, Fraction] = {}
    for (roots_a, powers_a), x in a.items():
        for (roots_b, powers_b), y in b.items():
            value = x * y
            for prime in set(roots_a) & set(roots_b):
                value *= prime
            powers = dict(powers_a)
            for letter, exponent in powers_b:
                powers[letter] = powers.get(letter, 0) + exponent
            monomial = (
                tuple(sorted(set(roots_a) ^ set(roots_b))),
                tuple(sorted((letter, exponent) for letter, exponent in powers.items() if exponent)),
            )
            total[monomial] = total.get(monomial, Fraction(0)) + value
    return _bounded({monomial: value for monomial, value in total.items() if value})


def _inverse(value: Plain) -> Plain:
    """1 / value: of one term, or of a sum without letters (its roots are moved to the numerator)."""
    if not value:
        raise ZeroDivisionError
    above: Plain = {_ONE: Fraction(1)}
    while len(value) > 1:
        if any(powers for _, powers in value):
            raise _NotPlain
        prime = next(roots[0] for roots, _ in value if roots)
        conjugate = {(roots, powers): -x if prime in roots else x for (roots, powers), x in value.items()}
        above, value = _multiply(above, conjugate), _multiply(value, conjugate)
    ((roots, powers), coefficient), *_ = value.items()
    for prime in roots:  # 1 / sqrt(p) = sqrt(p) / p
        coefficient *= prime
    inverted = {(roots, tuple((letter, -exponent) for letter, exponent in powers)): 1 / coefficient}
    return _multiply(above, inverted)


def _to_the(value: Plain, exponent: int) -> Plain:
    if exponent < 0:
        value, exponent = _inverse(value), -exponent
    result: Plain = {_ONE: Fraction(1)}
    for _ in range(exponent):
        result = _multiply(result, value)
    return result


def _root(value: Plain) -> Plain:
    number = _rational(value)
    if number is None:
        raise _NotPlain
    if not number:
        return {}
    inside = number.numerator * number.denominator  # sqrt(p/q) = sqrt(pq) / q
    if abs(inside) > MAX_ROOT:
        raise _NotPlain
    outside, primes = _square_part(abs(inside))
    roots = (-1, *primes) if inside < 0 else primes
    return {(roots, ()): Fraction(outside, number.denominator)}


@functools.lru_cache(maxsize=4096)
def _square_part(number: int) -> tuple[int, tuple[int, ...]]:
    """(k, primes) with number = k^2 times the product of these distinct primes."""
    outside, primes, factor = 1, list[int](), 2
    while factor * factor <= number:
        while number % (factor * factor) == 0:
            number //= factor * factor
            outside *= factor
        if number % factor == 0:
            number //= factor
            primes.append(factor)
        factor += 1 if factor == 2 else 2
    return outside, tuple(primes) if number == 1 else (*primes, number)


def _bounded(value: Plain) -> Plain:
    if len(value) > MAX_TERMS or any(
        x.numerator.bit_length() > MAX_BITS or x.denominator.bit_length() > MAX_BITS for x in value.values()
    ):
        raise _NotPlain
    return value
