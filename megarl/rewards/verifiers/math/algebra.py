r"""Formulas are read by latex2sympy and compared by `zero`. Only leaves that are genuine formulas come here.

The reader's blind spots are written in other ways first: decimals become fractions, which keeps every digit;
binomials, greatest divisors and the like become calls that are worked out only when their size is known. What it
would read wrongly is refused, and then only the same text is equal.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.concrete.expr_with_limits import ExprWithLimits

from megarl.rewards.verifiers.math.size import TooLarge, size
from megarl.rewards.verifiers.math.text import closing_bracket
from megarl.rewards.verifiers.math.zero import equal, proportional

MAX_FORMULA_CHARACTERS = 600
MAX_BRACKETS = 40
MAX_TERMS = 200  # of a sum that is worked out term by term
# latex2sympy would read "1 234" as 1234, "4\ldots" and "4_3" as 4, "5!!" as (5!)!, "\coth x" as cot(hx), show what is
# invisible, and drop a degree sign, a prime, the place where a derivative is taken, and all but a set's condition; take
# 0x1F for 0, f^{-1}(x) for 1/f(x), and a vector product for any other.
_UNREADABLE = re.compile(
    r"\$|\\ldots|\d\s*_|\^\{\\circ\}|(?<![\d_^.])\d+\s+\d|phantom|'|\|\s*_|!\s*!|\\(?:coth|sech|csch)|[;%]"
    r"|(?<![\d.])0x[\da-fA-F]|(?<![a-zA-Z\\])[fgh]\^\{-1\}\s*\(|\\times\s*\\(?:vec|overrightarrow)"
    r"|\\\{[^{}]*(?::|\\mid(?![a-z]))|\\\{[^{}|]*\|[^{}|]*\}"
)
_PRIMED = re.compile(r"(?<![\\a-zA-Z])([a-zA-Z])('+)(?!\s*_)")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # but that between two digits
_LONE = re.compile(r"(?<=[\^_])\{(\w)\}")
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\bmod(?![a-zA-Z])", r"\\mod "),
        (r"\^\s*(?:T|\{\s*T\s*\})", "^{1T}"),  # it would be dropped as a transposition
        (r"\^\s*e(?![a-zA-Z])", "^{e}"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![a-zA-Z])", r"\\ln "),
        (r"(?:\{\s*\}\s*)?_\s*(?:\{(\d+)\}|(\d))\s*C\s*_\s*(?:\{(\d+)\}|(\d))", r"\\binom{\1\2}{\3\4}"),
        (r"\\cr(?![a-zA-Z])\s*", r"\\\\"),
        (r"\|\s*(\\begin\{)matrix(\}.*?\\end\{)matrix(\})\s*\|", r"\1vmatrix\2vmatrix\3"),
        (r"(?<=[\d)])\s*(?=\\begin\{)", r"\\cdot "),  # no mixed fraction
        (r"(?<![a-zA-Z\\])d\s*(?=\\(?:end|\\))", "{d}"),  # no differential
        (r"\\(gcd|lcm)\s*\[([^\[\]]*)\]", r"\\\1(\2)"),
        (r"(?<![\w!])(\d+)\s*!\s*!(?!\s*!)", r"\\text{doublefactorial}(\1)"),
        (r"\\(max|min|gcd|lcm)\s*\\\{(.*?)\\\}", r"\\\1(\2)"),
        (r"\\(max|min|gcd|lcm|Gamma|Re|Im)\s*(?=\()", r"\\text{\1}"),
    )
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_COMBINATIONS = re.compile(
    r"(?<![a-zA-Z\\])(?:C|\\text\s*\{\s*C\s*\})(?:_\{?(\d+)\}?\s*\^\s*\{?(\d+)\}?|\s*\(\s*(\d+)\s*,\s*(\d+)\s*\))(?!\d)"
)
_BINOMIAL = re.compile(r"\\binom\s*(?=\{)")
_FUNCTIONS = MappingProxyType(
    {
        r"\text{binom}": sympy.binomial,
        r"\text{gcd}": sympy.gcd,
        r"\text{lcm}": sympy.lcm,
        r"\text{max}": sympy.Max,
        r"\text{min}": sympy.Min,
        r"\text{Gamma}": sympy.gamma,
        r"\text{doublefactorial}": sympy.factorial2,
        r"\text{sgn}": sympy.sign,
        r"\text{Re}": sympy.re,
        r"\text{Im}": sympy.im,
    }
)
_FLIPPED = MappingProxyType({sympy.StrictLessThan: ">", sympy.LessThan: ">="})
_CONVERSION = ConversionConfig(interpret_contains_as_eq=False, lowercase_symbols=False)


@dataclass(frozen=True)
class Relation:
    """`difference` is 0 (`=`), is not (`!=`), or is above it (`>`, `>=`). sides: as written, for what always holds."""

    kind: str
    difference: Any
    sides: frozenset[Any]


@functools.lru_cache(maxsize=8192)
def parse_formula(latex: str) -> Any | None:
    """Return the exact value of a formula: an expression, a matrix, a set, or a tuple of `Relation`.

    None for what cannot be read, a `TooLarge` (not raised) for what must not be evaluated.
    """
    latex = _PRIMED.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}}}", latex)  # a letter of its own
    if len(latex) > MAX_FORMULA_CHARACTERS or _depth(latex) > MAX_BRACKETS:
        return None
    try:
        readable = _readable(latex)
        if _UNREADABLE.search(readable):
            return None
        found = latex2sympy(readable, is_real=True, normalization_config=None, conversion_config=_CONVERSION)
        found = found.as_immutable() if isinstance(found, sympy.MatrixBase) else found
        if isinstance(found, sympy.And):
            return tuple(_relation(each) for each in found.args)
        if isinstance(found, sympy.core.relational.Relational):
            return (_relation(found),)
        return _evaluated(found) if isinstance(found, sympy.Basic) else None
    except TooLarge as error:
        return error
    except (Exception, RecursionError):
        return None


def same_formula(left: str, right: str, *, ignore_case: bool) -> bool:
    """Return whether two LaTeX formulas mean the same. ignore_case: `X` and `x` are one variable."""
    if _spelling(left) == _spelling(right):
        return True
    a, b = parse_formula(left), parse_formula(right)
    try:
        return _same(_lower(a), _lower(b)) if ignore_case else _same(a, b)
    except (Exception, RecursionError):
        return False


def is_number(latex: str, value: Fraction) -> bool:
    """Return whether a LaTeX formula is this number."""
    found = parse_formula(latex)
    try:
        return isinstance(found, sympy.Expr) and equal(found, sympy.Rational(value))
    except (Exception, RecursionError):
        return False


def is_too_large(latex: str) -> bool:
    """Return whether a formula can be read, and must not be evaluated."""
    return isinstance(parse_formula(latex), TooLarge)


def value_of(latex: str, digits: int) -> Fraction | None:
    """Return a real constant's value to `digits` significant decimal digits; None if it is no real constant."""
    expression = parse_formula(latex)
    try:
        value = sympy.N(expression, digits + 5)
        return Fraction(str(value)) if value.is_Rational or (value.is_Float and value.is_real) else None
    except Exception:
        return None


def _spelling(latex: str) -> str:
    return _LONE.sub(r"\1", _SPACE.sub("", latex))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(any(_same_relation(x, y) for y in b) for x in a)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(equal(x, y) for x, y in zip(a.flat(), b.flat(), strict=True))
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return equal(a, b)
    return isinstance(a, sympy.Basic) and a == b


def _same_relation(a: Relation, b: Relation) -> bool:
    """Equations are the same if one is the other times a constant, whatever solutions they have."""
    if a.kind != b.kind:
        return False
    if a.sides == b.sides and a.kind in ("=", "!="):
        return True
    return proportional(a.difference, b.difference, positive=a.kind in (">", ">="))


def _relation(relation: Any) -> Relation:
    left, right = _evaluated(relation.lhs), _evaluated(relation.rhs)
    if isinstance(relation, (sympy.StrictLessThan, sympy.LessThan)):
        left, right = right, left
    kind = _FLIPPED.get(type(relation), {"==": "="}.get(relation.rel_op, relation.rel_op))
    return Relation(kind, left - right, frozenset([left, right]))


def _readable(latex: str) -> str:
    for pattern, replacement in _REWRITTEN:
        latex = pattern.sub(replacement, latex)
    latex = _DECIMAL.sub(lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", latex)
    latex = _COMBINATIONS.sub(_combinations, latex)
    while match := _BINOMIAL.search(latex):
        middle = closing_bracket(latex, match.end(), ("{",))
        end = None if middle is None else closing_bracket(latex, middle + 1, ("{",))
        if middle is None or end is None:
            raise ValueError("a binomial without its arguments")
        upper, lower = latex[match.end() + 1 : middle], latex[middle + 2 : end]
        latex = rf"{latex[: match.start()]}\text{{binom}}({upper},{lower}){latex[end + 1 :]}"
    return latex


def _combinations(match: re.Match[str]) -> str:
    """Write `C_5^2` and `C(5,2)` as binomials, where the numbers let it be one."""
    of, chosen = (match[1], match[2]) if match[1] else (match[3], match[4])
    return rf"\binom{{{of}}}{{{chosen}}}" if int(chosen) <= int(of) else match[0]


def _evaluated(expression: Any) -> Any:
    """Work an expression out, exactly; it is measured before. Raises TooLarge.

    `i` is the imaginary unit unless it is the index of a sum. A derivative of a letter is a letter of its own.
    """
    size(expression)
    bound = {variable for node in expression.atoms(ExprWithLimits) for variable in node.variables}
    value = _work_out(expression, bound)
    size(value)
    return value


def _work_out(node: Any, bound: set[Any]) -> Any:
    if node.is_Symbol:
        return sympy.I if node.name == "i" and node not in bound else node
    if not node.args:
        return node
    if isinstance(node, sympy.Derivative) and not node.expr.has(*node.variables):
        return sympy.Symbol(str(node), real=True)
    arguments = [_work_out(argument, bound) for argument in node.args]
    if isinstance(node, sympy.UnevaluatedExpr):
        return arguments[0]
    if isinstance(node, sympy.Sum) and len(node.limits) == 1:
        return _added_up(node.func(*arguments))
    function = _FUNCTIONS.get(node.func.__name__, node.func)
    value = function(*arguments)
    if isinstance(value, (ExprWithLimits, sympy.Limit, sympy.Derivative, sympy.MatrixExpr)):
        return value.doit()
    return value


def _added_up(total: Any) -> Any:
    """Work out a sum: by a formula, or term by term if it has few. Raises TooLarge."""
    variable, first, last = total.limits[0]
    if not (first.is_Integer and last.is_Integer):
        return total.doit()
    terms = int(last - first) + 1
    if terms <= MAX_TERMS:
        return sympy.Add(*(total.function.subs(variable, first + step) for step in range(terms)))
    if not total.function.is_hypergeometric(variable):
        raise TooLarge("a long sum")
    end = sympy.Dummy(positive=True, integer=True)
    formula = sympy.Sum(total.function, (variable, first, end)).doit()
    if formula.has(ExprWithLimits, sympy.Function):
        raise TooLarge("a long sum without a formula")
    return formula.subs(end, last)


def _lower(found: Any) -> Any:
    """Put small letters for capital ones."""
    if isinstance(found, tuple):
        return tuple(Relation(r.kind, _lower(r.difference), frozenset(map(_lower, r.sides))) for r in found)
    if not isinstance(found, (sympy.Basic, sympy.MatrixBase)):
        return found
    letters = found.atoms(sympy.Symbol)
    return found.xreplace({letter: sympy.Symbol(letter.name.lower(), real=True) for letter in letters})


def _depth(latex: str) -> int:
    return max(accumulate((sign in "([{") - (sign in ")]}") for sign in latex), default=0)
