"""What an answer says: a number, a text, a set, a tuple, an interval, a matrix, an equation... or a formula.

`read` takes the structure apart by our own rules, down to leaves; only a leaf that is a genuine formula is
left for computer algebra. So "1,2" can never become 12, an interval keeps its brackets, and a set is
unordered while a tuple isn't, whatever an algebra system would make of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from megarl.rewards.verifiers.math.names import (
    FIGURE,
    figure_name,
    has_letters,
    is_name,
    letters_of,
    plain_name,
)
from megarl.rewards.verifiers.math.number import Number, read_number
from megarl.rewards.verifiers.math.text import closing_bracket, split_top
from megarl.rewards.verifiers.math.units import split_unit
from megarl.rewards.verifiers.math.words import TEXT_COMMAND, words_of

MAX_DEPTH = 40


@dataclass(frozen=True)
class Text:
    """An answer in words, without case, articles or outer punctuation."""

    words: str


@dataclass(frozen=True)
class Formula:
    """A formula, left for computer algebra. unit: normalised, or "". percent: the formula was followed by %."""

    latex: str
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True)
class Items:
    """Several answers, unordered; `braces`: written as a set, so repeated elements count once.

    joint: "and" or "or" if there are inequalities between them, which makes a difference; else "".
    """

    parts: tuple[Answer, ...]
    braces: bool
    joint: str = ""


@dataclass(frozen=True)
class Tuple:
    """Ordered parts between brackets: a point, a vector, or (with two parts) an interval."""

    left: str
    parts: tuple[Answer, ...]
    right: str


@dataclass(frozen=True)
class Union:
    """Sets joined by cup, unordered."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...]
    latex: str = field(default="", compare=False)


@dataclass(frozen=True)
class Assignment:
    """`name = values[0] = values[1]...`: every link of the chain must be right. `name` is "" for a bare chain.

    equation: the whole, if it is an equation between formulas (`y = 2x + 1`), else "".
    """

    name: str
    values: tuple[Answer, ...]
    equation: str = ""


@dataclass(frozen=True)
class Inequality:
    """A bound or range of one variable, as the interval it means."""

    name: str
    interval: Tuple
    latex: str = field(default="", compare=False)


@dataclass(frozen=True)
class Congruence:
    """`value \\pmod{modulus}`: what is left over. name: of what, or ""."""

    value: Answer
    modulus: Answer
    name: str = ""


Answer = Text | Formula | Number | Items | Tuple | Union | Matrix | Assignment | Inequality | Congruence

EMPTY_SET = Items((), braces=True)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_INFINITY = Formula(r"\infty")
_MINUS_INFINITY = Formula(r"-\infty")
_ALL_REALS = re.compile(r"(?:\\text\s*\{)?\s*all (?:real numbers|reals)\s*\}?", re.IGNORECASE)

THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_AND = r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*"
_LIST = re.compile(rf"{_AND}|\s*[,;]\s*")
_COMMA = re.compile(r"\s*[,;]\s*")
_COLON = re.compile(r"\s*(?::|\\text\s*\{\s*to\s*\}|(?<![a-zA-Z\\])to(?![a-zA-Z]))\s*")
_MINUTES = re.compile(r"0\d")
_ANY_INTEGER = re.compile(
    r"\(?\s*[ikmn]\s*\\in\s*\\mathbb\{Z\}\s*\)?"
)  # `k \in \mathbb{Z}` goes without saying
_CASES = re.compile(r"\\begin\{cases\}((?:(?!\\begin).)*)\\end\{cases\}", re.DOTALL)
_CONDITION = re.compile(r"\A(?:\\text\s*\{\s*(?:if|for|when)\s*\}|(?:if|for|when)\b)\s*")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_ABOUT = re.compile(r"\A\\approx(?![a-zA-Z])\s*")
_RELATION = re.compile(r"\\(?:le|ge|ne|approx|in|equiv|sim|cong)(?![a-zA-Z])|[=<>]")
_ENVIRONMENT = re.compile(r"\\begin\{([pbBvV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}\Z", re.DOTALL)
_ROW_END, _COLUMN_END = re.compile(r"\\cr(?![a-zA-Z])"), re.compile("&")
_MODULUS = re.compile(
    r"(.*?)\s*(?:\\pmod\s*\{([^{}]*)\}|\\[bp]?mod(?![a-zA-Z])\s*(\w+|\{[^{}]*\}))", re.DOTALL
)
_EQUIVALENT = re.compile(r"\\equiv(?![a-zA-Z])|=")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z])\s*\^\{\\circ\}")
_LETTERS_ONLY = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?'*")


def read(text: str, depth: int = 0) -> Answer | None:
    """Return the meaning of a tidy answer (see `text.tidy`); None for an empty one."""
    text = text.strip()
    if (whole := TEXT_COMMAND.fullmatch(text)) and _COMMA.search(whole[1]):
        text = whole[1].strip()  # a list set as text
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return EMPTY_SET
    if text == r"\mathbb{R}" or _ALL_REALS.fullmatch(text):
        return Tuple("(", (_MINUS_INFINITY, _INFINITY), ")")
    text = _ABOUT.sub("", text)
    if not re.search(r"[^\s{}\\$.,;:]", TEXT_COMMAND.sub(r"\1", text)):
        return None  # nothing but punctuation
    if depth > MAX_DEPTH:
        return Formula(text)
    return (
        _either_sign(text, depth)
        or _system(text, depth)
        or _french_interval(text, depth)
        or _congruence(text, depth)
        or _list(text, depth)
        or _relation(text, depth)
        or _union(text, depth)
        or _ratio(text, depth)
        or _bracketed(text, depth)
        or _matrix(text, depth)
        or _leaf(text)
    )


def _either_sign(text: str, depth: int) -> Answer | None:
    r"""`3 \pm 2` is 5 and 1; `\mp` takes the opposite sign."""
    if not _PLUS_MINUS.search(text):
        return None
    upper = _PLUS_MINUS.sub(lambda sign: "+" if sign[0] == r"\pm" else "-", text)
    lower = _PLUS_MINUS.sub(lambda sign: "-" if sign[0] == r"\pm" else "+", text)
    return _items([upper, lower], depth, braces=False)


def _french_interval(text: str, depth: int) -> Answer | None:
    """`]1, 2[` is (1, 2); also `[1, 2[` and `]1, 2]`."""
    if text[0] not in "[]" or text[-1] not in "[]" or (text[0], text[-1]) == ("[", "]"):
        return None
    parts = split_top(text[1:-1], _COMMA)
    if len(parts) != 2 or any(bracket in text[1:-1] for bracket in "[]"):
        return None
    left, right = "[" if text[0] == "[" else "(", "]" if text[-1] == "]" else ")"
    return _tuple(left, parts, right, depth)


def _system(text: str, depth: int) -> Answer | None:
    """Read a system of equations, or the cases of a function with their conditions; in any order."""
    match = _CASES.fullmatch(text)
    if match is None:
        return None
    rows = [row.rstrip(" ,;.") for row in split_top(match[1], _ROW_END)]
    cells = [[cell.strip(" ,;") for cell in split_top(row, _COLUMN_END)] for row in rows if row]
    if all(len(row) == 1 for row in cells):
        found = _items([row[0] for row in cells], depth, braces=False)
        return _joined(found, {"and"})
    cases = [_read_all([_CONDITION.sub("", cell) for cell in row if cell], depth) for row in cells]
    if not all(cases):
        return None
    return Items(tuple(Tuple("", case, "") for case in cases if case), braces=False)


def _congruence(text: str, depth: int) -> Answer | None:
    r"""Read `2 \pmod{5}` and `x \equiv 2 \pmod{5}`; `17 \bmod 5` by itself is an operation."""
    match = _MODULUS.fullmatch(text)
    if match is None or (match[2] is None and r"\equiv" not in match[1]):
        return None
    first, *others = (side.strip() for side in _EQUIVALENT.split(match[1]))
    value = read(others[-1] if others else first, depth + 1)
    modulus = read(match[2] or match[3], depth + 1)
    name = plain_name(first) if others and is_name(first) else ""
    return None if value is None or modulus is None else Congruence(value, modulus, name)


def _list(text: str, depth: int) -> Answer | None:
    """Read answers side by side. Outside brackets a comma may group thousands; inside them it always separates."""
    joints: list[str] = []
    parts = split_top(text, _LIST, keep=THOUSANDS, found=joints)
    if len(parts) == 1:
        return None
    shown = [part for part in parts if part and not _ANY_INTEGER.fullmatch(part)]
    found = _items(shown or parts, depth, braces=False)
    words = {word[0] for joint in joints for word in [re.search("and|or", joint)] if word}
    return _joined(found, words)


def _joined(found: Answer | None, words: set[str]) -> Answer | None:
    """Note the word that joins a list with an inequality in it."""
    if len(words) == 1 and isinstance(found, Items) and any(isinstance(p, Inequality) for p in found.parts):
        return replace(found, joint=min(words))
    return found


def _relation(text: str, depth: int) -> Answer | None:
    if not _RELATION.search(text):
        return None
    operators: list[str] = []
    sides = split_top(text, _RELATION, found=operators)
    if not operators or not all(sides):
        return None
    kinds = set(operators)
    if kinds in ({r"\in"}, {r"\approx"}) and len(sides) == 2 and is_name(sides[0]):
        values = _read_all(sides[1:], depth)
        return Assignment(plain_name(sides[0]), values) if values else None
    if kinds == {r"\approx"} and len(sides) == 2:
        return read(sides[0], depth + 1)
    if kinds <= {"=", r"\approx"}:
        return _assignment(sides, operators, depth)
    if kinds <= {"<", ">", r"\le", r"\ge"}:
        return _inequality(sides, operators, depth)
    return None


def _assignment(sides: list[str], operators: list[str], depth: int) -> Answer | None:
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        sides = sides[::-1]
    named = is_name(sides[0]) and not re.fullmatch(r"\(?\d.*", sides[0])
    exact = [sides[0]] + [
        side for side, operator in zip(sides[1:], operators, strict=True) if operator == "="
    ]
    worked_out = len(exact) > 2 and has_letters(exact[0]) and not any(map(is_name, exact))
    if not (named or worked_out) and any(has_letters(side) for side in sides):
        return None  # an equation in its own right
    named = named or worked_out
    if named and len(exact) > 2 and not any(len(step) == 1 and is_name(step) for step in exact[1:]):
        # `A = \pi r^2 = 25\pi` and `AB = BC = 5`: a step on the way speaks of other letters, or is a name.
        last = letters_of(exact[-1])
        steps = [step for step in exact[1:-1] if letters_of(step) <= last and not is_name(step)]
        exact = [exact[0], *steps, exact[-1]]
    values = _read_all(exact[1:] if named else exact, depth)
    if not values:
        return None
    if named and any(isinstance(value, Formula) and _has(value.latex, sides[0]) for value in values):
        return None  # `x = x + 1` doesn't say what x is
    relates = len(sides) == 2 and operators == ["="] and _LETTERS_ONLY.fullmatch(sides[0])
    equation = f"{sides[0]}={sides[1]}" if relates else ""
    return Assignment(plain_name(sides[0]) if named else "", values, equation)


def _inequality(sides: list[str], operators: list[str], depth: int) -> Answer | None:
    names = [index for index, side in enumerate(sides) if is_name(side)]
    if len(names) != 1 or len(sides) > 3 or (len(sides) == 3 and names != [1]):
        return None
    at, name = names[0], sides[names[0]]
    if any(_has(side, name) for index, side in enumerate(sides) if index != at):
        return None
    low: tuple[str, Answer] = ("(", _MINUS_INFINITY)
    high: tuple[str, Answer] = (")", _INFINITY)
    for index, operator in enumerate(operators):
        variable_first = at == index
        bound = read(sides[index + 1 if variable_first else index], depth + 1)
        if bound is None:
            return None
        closed = operator in (r"\le", r"\ge")
        if (operator in ("<", r"\le")) == variable_first:
            high = ("]" if closed else ")", bound)
        else:
            low = ("[" if closed else "(", bound)
    if len(sides) == 3 and (low[1] is _MINUS_INFINITY or high[1] is _INFINITY):
        return None  # 1 < x > 2 is no range
    latex = " ".join([sides[0], *(part for pair in zip(operators, sides[1:], strict=True) for part in pair)])
    return Inequality(plain_name(name), Tuple(low[0], (low[1], high[1]), high[0]), latex)


def _union(text: str, depth: int) -> Answer | None:
    parts = split_top(text, _CUP)
    if len(parts) == 1:
        return None
    answers = _read_all(parts, depth)
    return None if answers is None else Union(answers)


def _ratio(text: str, depth: int) -> Answer | None:
    """`3:4`, and times of day: ordered, and compared part by part. 12:05 is not 12:5."""
    parts = split_top(text, _COLON)
    time = any(_MINUTES.match(part) for part in parts[1:])
    return _tuple(":", parts, "time" if time else ":", depth) if len(parts) > 1 else None


def _bracketed(text: str, depth: int) -> Answer | None:
    if text.startswith(r"\langle") and text.endswith(r"\rangle"):
        return _tuple("(", split_top(text[len(r"\langle") : -len(r"\rangle")], _COMMA), ")", depth)
    opening = r"\{" if text.startswith(r"\{") else text[0]
    if opening not in (r"\{", "(", "[", "{"):
        return None
    end = closing_bracket(text, 0)
    closing = text[end:] if end is not None else ""
    if closing not in (r"\}", ")", "]", "}") or end is None:
        return None
    inner = text[len(opening) : end].strip()
    if opening == "{":
        return read(inner, depth + 1) if closing == "}" else None
    parts = split_top(inner, _COMMA)
    if opening == r"\{":
        if closing != r"\}" or re.search(r"\\mid(?![a-zA-Z])|:", inner) or inner.count("|") % 2:
            return None  # set-builder notation
        return _items(parts, depth, braces=True)
    if len(parts) > 1:
        return _tuple(opening, parts, closing, depth)
    in_brackets = inner.startswith(r"\begin") or (opening, closing) == ("(", ")")
    return read(inner, depth + 1) if in_brackets else None


def _matrix(text: str, depth: int) -> Answer | None:
    match = _ENVIRONMENT.match(text)
    if match is None or match[1] in ("vmatrix", "Vmatrix"):  # those are determinants and norms
        return None
    if match[2].find(r"\end{") < match[2].find(r"\begin{"):
        return None  # more than one: a sum, say
    rows = [row for row in split_top(match[2], _ROW_END) if row]
    cells = [row for row in (_read_all(split_top(row, _COLUMN_END), depth) for row in rows) if row]
    return Matrix(tuple(cells), text) if rows and len(cells) == len(rows) else None


def _items(parts: list[str], depth: int, *, braces: bool) -> Answer | None:
    answers = _read_all(parts, depth)
    return Items(answers, braces) if answers or (braces and answers is not None) else None


def _tuple(left: str, parts: list[str], right: str, depth: int) -> Answer | None:
    answers = _read_all(parts, depth)
    return None if answers is None else Tuple(left, answers, right)


def _read_all(parts: list[str], depth: int) -> tuple[Answer, ...] | None:
    """Return the meaning of every part; None if one of them is empty."""
    answers = [read(part, depth + 1) for part in parts]
    return None if None in answers else tuple(answer for answer in answers if answer is not None)


def _leaf(text: str) -> Answer:
    content = TEXT_COMMAND.fullmatch(text)
    number = read_number(text) or (read_number(content[1]) if content else None)
    if number is not None:
        return number
    if (words := words_of(text)) is not None:
        return Text(words)
    if FIGURE.search(text):
        return Text(figure_name(text))
    if content and len(content[1].strip()) == 1:
        text = content[1].strip()
    if _TRIGONOMETRIC.search(text) and r"^{\circ}" in text:
        return Formula(_DEGREES.sub(r"\\frac{\1\\pi}{180}", text))
    percent = text.endswith("%")
    body, unit = split_unit(text[:-1].rstrip() if percent else text)
    return Formula(body, unit, percent)


def _has(text: str, name: str) -> bool:
    """Return whether a name stands in a formula by itself: `x` in `x+1`, but not in `x_0` or `\\max`."""
    return bool(re.search(rf"(?<![a-zA-Z\\]){re.escape(name)}(?![a-zA-Z_'])", text))
