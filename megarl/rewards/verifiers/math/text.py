"""One surface for many spellings of the same formula: LaTeX, plain ASCII and Unicode.

`tidy` is idempotent and changes spelling only, never a value. Number grouping is decided here, because
spacing commands carry it: `1{,}234`, `1,\\!234` and `1\\,234` are one number wherever they stand.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from types import MappingProxyType

_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPT = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")
# A sign and the name of its TeX command.
_COMMANDS = (
    "×times ·cdot ⋅cdot ∙cdot ±pm ∓mp ∞infty ≤le ≥ge ≠ne ≈approx ∪cup ∩cap ∅emptyset ∈in …ldots ⟨langle ⟩rangle "
    "αalpha βbeta γgamma θtheta λlambda πpi φphi ωomega"
)
_UNICODE = str.maketrans(
    {word[0]: rf"\{word[1:]} " for word in _COMMANDS.split()}
    | dict.fromkeys("−–﹣", "-")
    | dict.fromkeys("÷⁄", "/")
    | dict.fromkeys("“”", '"')
    | dict.fromkeys("’‘", "'")
    | {"°": r"^{\circ}", "ℝ": r"\mathbb{R}", "€": r"\text{euros}", "£": r"\text{pounds}"}
    | {"\N{NO-BREAK SPACE}": " ", "\N{ZERO WIDTH SPACE}": ""}
)

_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\{,\}|,\\!\s*|\\,)\d{3})+)(?![\d]|\{,\}|,\\!|\\,\d)")
ANY_BRACKET = ("(", "[", "{", r"\{")
_OPENING = MappingProxyType({")": "(", "]": "[", "}": "{", r"\}": r"\{"})
_OUTER_MATH = ((r"\[", r"\]"), (r"\(", r"\)"), ("$$", "$$"), ("$", "$"))

# (pattern, replacement), applied in order.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\$\s*(-?[\d.][\d.,]*\d|-?\d)", r"\1\\text{dollars}"),  # \$5 is an amount, $5$ is a formula
        (r"\\\$|\$", ""),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([eid])\s*\}", r"\1"),  # upright constants are not units
        (r"\\math(?:bin|rel|ord|op|punct|inner)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1"),
        # Functions set upright are functions, not text.
        (
            r"\\(?:mathrm|text|operatorname\*?)\s*\{\s*((?:arc|ar)?(?:sin|cos|tan)h?|arc(?:cot|sec|csc)|cot|sec|csc"
            r"|ln|log|lg|exp|det|gcd|lcm|max|min|lim)\s*\}",
            r"\\\1 ",
        ),
        (r"\(\s*\\(?:mathrm|text|operatorname)\s*\{\s*mod\s*\}\s*([^()]+)\)", r"\\pmod{\1}"),
        (r"\(\s*(?:\\[bp]?mod(?![a-zA-Z])|\bmod(?![a-zA-Z]))\s*([^()]+)\)", r"\\pmod{\1}"),
        (r"\\pmod\s*(\d|[a-zA-Z])", r"\\pmod{\1}"),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*mod\s*\}|(?<=[\d\s)}])mod(?=[\d\s({])", r"\\bmod "),
        (r"\\(?:left|right|middle)(?![a-zA-Z])\.?", ""),
        (r"\\[bB]igg?[lrm]?(?![a-zA-Z])", ""),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|[hv]?phantom\{[^{}]*\})(?![a-zA-Z])",
            " ",
        ),
        (r"\\!", ""),
        (r"\\hspace\*?\{[^{}]*\}|\\(?:quad|qquad|enspace|thinspace|medspace|thickspace)(?![a-zA-Z])", " "),
        (r"\\(?:[,;:> ]|\n)|~", " "),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\{,\}", ","),
        (r"(?<=\.)(\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"\1\\overline{\2\3\4}"),
        (r"\\\|", r"\\Vert "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (
            r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathsf|mathtt|operatorname\*?|mbox|hbox)\s*(?=\{)",
            r"\\text",
        ),
        (r"\\(?:mathbb|Bbb)\s*(?:\{\s*([A-Z])\s*\}|([A-Z])(?![a-zA-Z]))", r"\\mathbb{\1\2}"),
        (r"\A\s*\\mathbf\s*\{\s*R\s*\}\s*\Z", r"\\mathbb{R}"),
        (
            r"(?<=\\in)\s*(?:\b([NZQRC])|\\(?:mathbf|mathrm|text)\s*\{\s*([NZQRC])\s*\})(?=\s*(?:$|[,;)^]))",
            r"\\mathbb{\1\2}",
        ),
        (r"\\(?:mathbf|mathit|boldsymbol|bm|mathnormal)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1"),
        (r"\\(?:wide)?hat\s*\{\s*\\?([ijk])(?:math)?\s*\}", r"\1"),  # a unit vector
        (r"\\(begin|end)\{(?:small(matrix)|([pbBvV]?matrix)\*|(?:[dr]|dr)(cases))\}", r"\\\1{\2\3\4}"),
        (r"\\bigcup(?![a-zA-Z])\s*(?![_^])", r"\\cup "),
        (r"(?<![a-zA-Z\\])([ap])\.\s?m\.?(?![a-zA-Z])", r"\1m"),
        (r"(?<=:\d\d)\s*([aApP])[mM](?![a-zA-Z])", r"\\text{\1m}"),
        (r"\\(?:boxed|fbox)\s*(?=\{)", ""),
        (r"\\%", "%"),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])", r"\\ge "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|\\(?:neq|ne)(?![a-zA-Z])", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\lbrace(?![a-zA-Z])\s*", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:cdots|dots|ldots|dotsc|dotsb)(?![a-zA-Z])\s*|\.\.\.", r"\\ldots "),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\\div(?![a-zA-Z])", "/"),
        (
            r"\^\s*\{\s*\\(?:circ|degree)\s*\}|(?:\^\s*\\circ|\^?\s*\\degree)(?![a-zA-Z])|\\text\{\s*degrees?\s*\}",
            r"^{\\circ}",
        ),
        (r"\\imath(?![a-zA-Z])", "i"),
        (r"\*\*(?=\s*[-\w({\\])", "^"),
        (r"(?<=[\w)}])\s*\*\s*(?=[\w(\\-])", r" \\cdot "),
        (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
        (
            r"(?<![\\a-zA-Z{])(pi|sqrt|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|ln|log|exp|gcd|lcm)(?=[\s\d({^/*+)-]|$)",
            r"\\\1 ",
        ),
    )
)
_FOR_RULES = re.compile(r"[^\s\d.,;()\[\]/+-]|\.\.\.")  # numbers, tuples and intervals need no rule
_OVERESCAPED = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|text|pi|left|right|cdot|times|boxed|infty|leq?|geq?|neq?|in|cup|pm|circ)(?![a-zA-Z]))"
)
_ROW_BREAK = re.compile(r"\\\\(?:\[[^\]]*\])?")
_TIDY_ALREADY = re.compile(r"-?[0-9]+")
_SPACES = re.compile(r"\s+")
_FRACTION = re.compile(r"\\(?:frac|binom)(?![a-zA-Z])")
_POWER = re.compile(r"\^(?=\s*\()")  # x^(1/2), as programs write it
_SQRT = re.compile(r"\\sqrt(?=\s*[\w\\(])")


def tidy(text: str) -> str:
    """Return the canonical spelling of a short formula or answer."""
    if _TIDY_ALREADY.fullmatch(text):
        return text
    before = None
    for _ in range(4):  # a fixed point after one or two rounds; bounded, whatever the text
        if text == before:
            break
        before = text
        text = _tidy_once(text)
    return text


def _tidy_once(text: str) -> str:
    text = _from_unicode(text)
    text = text.replace("**", "") if text.startswith("**") and text.endswith("**") else text
    text = _GROUPED.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = text.strip().strip("`").strip()
    for opening, closing in _OUTER_MATH:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            inner = text[len(opening) : -len(closing)]
            if opening not in inner and closing not in inner and not inner.endswith("\\"):
                text = inner
    text = _ROW_BREAK.sub(r"\\cr " if r"\begin" in text else " ", _OVERESCAPED.sub(r"\\", text))
    if _FOR_RULES.search(text):
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
    text = _SPACES.sub(" ", text).strip()
    text = _strip_trailing(text)
    for command, arguments in ((_FRACTION, 2), (_SQRT, 1), (_POWER, 1)):
        text = _with_braces(text, command, arguments, parentheses=command is not _FRACTION)
    return text.strip()


def _from_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub(r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+)", lambda m: "^{" + m[1].translate(_SUPERSCRIPT) + "}", text)
    text = re.sub(r"([₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+)", lambda m: "_{" + m[1].translate(_SUBSCRIPT) + "}", text)
    text = re.sub(
        r"√\s*(\(|\{|\d+(?:\.\d+)?|[a-z])",
        lambda m: r"\sqrt" + (m[1] if m[1] in "({" else "{" + m[1] + "}"),
        text,
    )
    text = re.sub(r"([€£])\s*(-?[\d.][\d.,]*\d|-?\d)", r"\2\1", text)
    text = re.sub(r"[¼-¾⅐-⅞]", _vulgar, text)
    text = re.sub(r"\d", lambda m: str(unicodedata.decimal(m[0])), text)  # of any script
    return unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match.group()).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _strip_trailing(text: str) -> str:
    """Remove a sentence's punctuation or a lone backslash at the end."""
    while text and text[-1] in ".,;:!\\" and not text.endswith(r"\!"):
        if text[-1] == "!" and len(text) > 1 and (text[-2].isalnum() or text[-2] in ")}!"):
            break  # a factorial
        text = text[:-1].rstrip()
    return text


def _argument(text: str, start: int, *, parentheses: bool) -> tuple[str, int] | None:
    """Return the TeX argument at `start` (a group, a command or one character) and where it ends.

    parentheses: they make a group, too.
    """
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text):
        return None
    if text[start] == "{" or (parentheses and text[start] == "("):
        end = closing_bracket(text, start, ("{",) if text[start] == "{" else ANY_BRACKET)
        return None if end is None else (text[start + 1 : end], end + 1)
    if text[start] == "\\":
        match = re.compile(r"\\[a-zA-Z]+").match(text, start)
        return (match.group(), match.end()) if match else None
    return text[start], start + 1


def _with_braces(text: str, command: re.Pattern[str], arguments: int, *, parentheses: bool = False) -> str:
    r"""Write `\frac12`, `\binom5{2}`, `\sqrt2`, `\sqrt(2)` and `x^(2)` with braces, at any depth."""
    pieces, position = [], 0
    for match in command.finditer(text):
        if match.start() < position:
            continue
        end, contents = match.end(), list[str]()
        while len(contents) < arguments and (found := _argument(text, end, parentheses=parentheses)):
            contents.append(found[0])
            end = found[1]
        if len(contents) == arguments:
            inner = [
                _with_braces(content, command, arguments, parentheses=parentheses) for content in contents
            ]
            pieces += [
                text[position : match.start()],
                match.group(),
                *(f"{{{content}}}" for content in inner),
            ]
            position = end
    return "".join([*pieces, text[position:]])


def closing_bracket(text: str, start: int, kinds: Sequence[str] = ANY_BRACKET) -> int | None:
    r"""Return the position of the bracket (its first character) that ends the one at `start`, None without one.

    kinds: the opening brackets that count. Any of their closing ones ends any of them: `[` and `)` make an interval.
    """
    depth, position = 0, start
    while position < len(text):
        token = text[position : position + 2] if text[position] == "\\" else text[position]
        if token in kinds:
            depth += 1
        elif _OPENING.get(token) in kinds:
            depth -= 1
            if depth == 0:
                return position
        position += len(token)
    return None


def split_top(
    text: str,
    separators: re.Pattern[str],
    keep: re.Pattern[str] | None = None,
    found: list[str] | None = None,
) -> list[str]:
    """Cut `text` at the separators that stand outside every bracket and environment; pieces are stripped.

    keep: what is never cut, looked for outside brackets only. found: gets the separators.
    """
    pieces, depth, start, position = [], 0, 0, 0
    while position < len(text):
        if depth == 0 and keep is not None and (match := keep.match(text, position)):
            position = match.end()
            continue
        if depth == 0 and (match := separators.match(text, position)) and match.end() > position:
            pieces.append(text[start:position])
            if found is not None:
                found.append(match.group())
            start = position = match.end()
            continue
        if text[position] == "\\":
            if text.startswith((r"\{", r"\begin{", r"\langle"), position):
                depth += 1
            elif text.startswith((r"\}", r"\end{", r"\rangle"), position):
                depth -= 1
            position += 2
            continue
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth = max(depth - 1, 0)
        position += 1
    pieces.append(text[start:])
    return [piece.strip() for piece in pieces]
