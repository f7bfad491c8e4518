"""Formulas are compared by math-verify (sympy). Only leaves that are genuine formulas come here.

Guards around it: decimals become exact fractions (math-verify rounds floats, so 0.0000001 would equal 0); a
formula that evaluates to an astronomically large number is refused before it is evaluated; nesting and length
are bounded; the pair is ordered before it is compared, so the verdict is symmetric; no signal is used, so
threads and processes both work (the bound on time is the worker pool's).
"""

from __future__ import annotations

import functools
import logging
import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.concrete.expr_with_limits import ExprWithLimits

MAX_FORMULA_CHARACTERS = 600
MAX_BRACKETS = 40
MAX_LOG2 = 2.0**18  # about 79,000 decimal digits
MAX_NODES = 1000
# math-verify would read "1 234" as 1234, "4\ldots", "4_3" and "4 \mod 3" as 4, show what is invisible, and drop a
# degree sign, a prime, the place where a derivative is taken, and all but a set's condition.
_UNREADABLE = re.compile(
    r"\$|\\ldots|\\mod(?![a-z])|\d\s*_|\^\{\\circ\}|(?<![\d_^.])\d+\s+\d|phantom|'|\|\s*_"
    r"|\\\{[^{}]*(?::|\\mid(?![a-z]))|\\\{[^{}|]*\|[^{}|]*\}"
)
_PRIMED = re.compile(r"(?<![\\a-zA-Z])([a-zA-Z])('+)(?!\s*_)")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # but that between two digits
_TO_THE_T = re.compile(r"\^\s*(?:T|\{\s*T\s*\})")  # math-verify drops it as a transposition


@functools.cache
def _configuration() -> list[LatexExtractionConfig]:
    """Parse what we hand over and search for nothing; silence the library's note that it bounds no time."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    plain = LatexExtractionConfig(boxed_match_priority=-1)
    normalization = replace(plain.normalization_config, units=False, nits=False, boxed="none")
    return [replace(plain, normalization_config=normalization)]


@functools.lru_cache(maxsize=8192)
def parse_formula(latex: str) -> Any | None:
    """Return the sympy object, exact; None for what cannot be read or must not be evaluated."""
    latex = _PRIMED.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}}}", latex)  # a letter of its own
    latex = _TO_THE_T.sub("^{1T}", latex)
    if len(latex) > MAX_FORMULA_CHARACTERS or _depth(latex) > MAX_BRACKETS or _UNREADABLE.search(latex):
        return None
    try:
        found = parse(
            f"${latex}$",
            _configuration(),
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
        return _exact(found[0]) if found and _is_moderate(found[0]) else None
    except (Exception, RecursionError):
        return None


def same_formula(left: str, right: str, *, ignore_case: bool) -> bool:
    """Return whether two LaTeX formulas mean the same. ignore_case: `X` and `x` are one variable."""
    if _SPACE.sub("", left) == _SPACE.sub("", right):
        return True
    if not ignore_case and _cases_differ(left, right):
        return False
    first, second = sorted((left, right))
    a, b = parse_formula(first), parse_formula(second)
    if a is None or b is None or _one_is_an_equation(a, b):
        return False
    quick = _quickly(a, b)
    return bool(verify(a, b, timeout_seconds=None, float_rounding=12)) if quick is None else quick


def _one_is_an_equation(a: Any, b: Any) -> bool:
    """`x^2 + y^2 = 25` is not 25 and `x - 2y + 3 = 0` is not 0, whereas `|A| = 5` says what a quantity is.

    math-verify takes the right side of an equation in the answer, whatever stands on the left.
    """
    if _is_relation(a) == _is_relation(b):
        return False
    relation = a if _is_relation(a) else b
    left = getattr(relation, "lhs", None)
    if left is None or isinstance(left, (sympy.Add, sympy.Mul, sympy.Pow)):
        return True
    return left.is_Symbol and left in relation.rhs.free_symbols


def _is_relation(formula: Any) -> bool:
    # A letter by itself is Boolean to sympy, too.
    return isinstance(formula, sympy.logic.boolalg.Boolean) and not isinstance(formula, sympy.Expr)


def _quickly(a: Any, b: Any) -> bool | None:
    """Return a verdict that needs no simplification, or None where math-verify has to decide.

    The difference, multiplied out, is a number: that is exact, however small. Or it is not zero at a point: sympy
    evaluates it until its digits are significant. Sums and integrals are only approximated, so they must differ
    clearly. Most pairs of plain expressions end here, ten times faster.
    """
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return None
    try:
        difference = sympy.expand(a - b)
        if difference.is_Rational:
            return bool(difference == 0)
        symbols = sorted(difference.free_symbols, key=str)
        at = {symbol: sympy.Rational(7 + 4 * index, 11 + index) for index, symbol in enumerate(symbols)}
        if not difference.has(ExprWithLimits):
            parts = sympy.N(difference.subs(at), 20).as_real_imag()
            # sympy marks a number without a significant digit by the precision 1.
            return False if any(part.is_Float and part._prec > 1 for part in parts) else None
        apart, *sizes = (abs(complex(sympy.N(x.subs(at), 20))) for x in (difference, a, b))
        return False if 1e-9 * max(sizes) < apart < math.inf else None
    except Exception:
        return None


def value_of(latex: str, digits: int) -> Fraction | None:
    """Return a real constant's value to `digits` significant decimal digits; None if it is no real constant."""
    expression = parse_formula(latex)
    try:
        value = sympy.N(expression, digits + 5)
        return Fraction(str(value)) if value.is_Rational or (value.is_Float and value.is_real) else None
    except Exception:
        return None


def _exact(expression: Any) -> Any:
    """Put fractions for decimals, the imaginary unit for `i` (the index of a sum excepted), and one kind of letter:
    math-verify's are real or not depending on whether the formula has an `i`, so x would differ from x + i - i."""
    exact = {x: sympy.Rational(str(x)) for x in expression.atoms(sympy.Float)}
    letters = expression.atoms(sympy.Symbol)
    exact |= {x: sympy.Symbol(x.name, real=True) for x in letters if not x.is_real}
    if not expression.atoms(sympy.Sum, sympy.Product):
        exact |= {x: sympy.I for x in letters if x.name == "i"}
    return expression.xreplace(exact) if exact else expression


def _is_moderate(expression: Any) -> bool:
    """Return whether it has not too many nodes, and no number that would take more than MAX_LOG2 bits."""
    if not isinstance(expression, sympy.Basic):
        return True
    for count, node in enumerate(sympy.preorder_traversal(expression)):
        if count > MAX_NODES or _log2(node) > MAX_LOG2:
            return False
    return True


def _log2(node: Any) -> float:
    """Return an upper bound of log2 |node| for numbers; 1 for what is no number."""
    if node.is_Rational:
        return math.log2(abs(node.p) + 1)
    if isinstance(node, sympy.Pow):
        base, exponent = (_log2(arg) for arg in node.args)
        return base * 2.0**exponent if exponent < 64 else math.inf
    if isinstance(node, sympy.Mul):
        return sum(_log2(arg) for arg in node.args)
    if isinstance(node, sympy.Add):
        return max(_log2(arg) for arg in node.args) + math.log2(len(node.args))
    if isinstance(node, (sympy.factorial, sympy.binomial, sympy.gamma)):
        argument = _log2(node.args[0])
        return argument * 2.0**argument if argument < 64 else math.inf
    return 1.0


def _depth(latex: str) -> int:
    return max(accumulate((sign in "([{") - (sign in ")]}") for sign in latex), default=0)


def _cases_differ(left: str, right: str) -> bool:
    """Return whether two formulas have the same variables but for their case."""
    a, b = (frozenset(re.findall(r"[A-Za-z]", re.sub(r"\\[a-zA-Z]+", " ", text))) for text in (left, right))
    fold = str.casefold
    return a != b and frozenset(map(fold, a)) == frozenset(map(fold, b))
