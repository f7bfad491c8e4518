r"""Names: of quantities (x, f(2), |AB|, P(X=4), \cos A, V_1:V_2), whose value may be an answer, and of figures."""

from __future__ import annotations

import re

from megarl.rewards.verifiers.math.text import split_top

_NAME = re.compile(
    r"(?:m?\s*\\angle\s*[A-Z]{1,3}|[a-zA-Z]|\\[a-zA-Z]+|\\text\s*\{[^{}]*\}|[A-Z]{2,3})(?:_\{?[\w,]+\}?|'|\\prime)*(?:\^\{?-1\}?)?"
    r"(?:\s*\(\s*[\w,\s\\]{1,20}\))?"
)
_NAMES = re.compile(rf"\(?\s*{_NAME.pattern}(?:\s*,\s*{_NAME.pattern})*\s*\)?")
# Names of quantities beyond letters: probabilities and values of functions (`_CALL`), lengths, areas, ratios of these.
_CALL = re.compile(
    r"(?:(P|Pr|E|Var|Cov|n|\\(?:mathbb|text)\s*\{\s*(?:P|Pr|E|Var|Cov)\s*\})(?:_\{?\w+\}?)?|[a-zA-Z](?:_\{?\w+\}?)?'*(?:\^\{-1\})?)"
    r"\s*[(\[]((?:[^()\[\]]|\([^()\[\]]*\)){1,60})[)\]]"
)
_POINTS = r"(?:[A-Z]{2,}|[A-Z]_\{?\w+\}?(?:[A-Z]_\{?\w+\}?)?)"
_LENGTH = rf"(?:{_POINTS}|\\overline\s*\{{\s*{_POINTS}\s*\}}|\|\s*{_POINTS}\s*\||[A-Z]_\{{[^{{}}]*\}})"
_ANGLES = (
    r"(?:\d*\s*(?:(?:\\angle\s*)?[A-Za-z]{1,3}|\\[a-z]+)(?:_\{?\w+\}?)?"
    r"|\(\s*[^()=]*[a-zA-Z][^()=]*\)|\\frac\{[^{}]*[a-zA-Z][^{}]*\}\{\d\})"
)
_QUANTITIES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{{?2\}}?)?\s*{_ANGLES}",
        r"\|\s*(?:[A-Za-wz](?:_\{?\w+\}?)?|[A-Z]{2,}|[^|]*\\(?:vec|overrightarrow|mathbf|overline)[^|]*)\s*\|",
        r"\\(?:overline|bar|hat|vec|overrightarrow|widehat|tilde|mathcal|mathbb)\s*\{?\s*[A-Za-z]+\s*\}?(?:_\{?\w+\}?)?",
        r"\\(?:dim|deg|arg|det|max|min)\s*\(?\s*[A-Za-z](?:_\{?\w+\}?)?(?:\s*\([a-z]\))?\s*\)?",
        r"[A-Z](?:\s*\\(?:cup|cap|setminus)(?![a-zA-Z])\s*[A-Z])+",
        r"\\Vert[^|=]{1,40}\\Vert",
        r"\(\s*[a-zA-Z](?:\s*\\circ\s*[a-zA-Z])+\s*\)\s*\([^()]{1,30}\)",
        r"\[\s*[A-Z]{3,}\s*\]",
        r"[A-Za-z]_\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\}",
        r"\\frac\{\s*d\^?\{?\d?\}?\s*[a-zA-Z]\s*\}\{\s*d\s*[a-zA-Z](?:\^\{?\d\}?)?\s*\}",
        rf"\\frac\{{\s*{_LENGTH}\s*\}}\{{\s*{_LENGTH}\s*\}}|{_LENGTH}\s*/\s*{_LENGTH}",
    )
)
_NOT_A_NAME = re.compile(r"\\(?:frac|sqrt|pi|infty|emptyset)(?![a-zA-Z])")
_LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_COMMAND_OR_CONSTANT = re.compile(r"\\[a-zA-Z]+|(?<![a-zA-Z])[ei](?![a-zA-Z])")
_COLON = re.compile(r"\s*:\s*")
_COMPARED = re.compile(r"\\(?:le|ge|ne|approx|in|equiv|sim|cong)(?![a-zA-Z])|[=<>]")
FIGURE = re.compile(
    r"\\(?:triangle|angle|square|odot|parallel|perp|overrightarrow|overleftrightarrow)(?![a-zA-Z])"
)


def figure_name(text: str) -> str:
    """Return a figure's name, in which the order of the points counts; an angle may be read from either side."""
    name = re.sub(r"[\s{}]", "", text)
    angle = re.fullmatch(r"(\\angle)([A-Z]{3})", name)
    return angle[1] + min(angle[2], angle[2][::-1]) if angle else name


def is_name(text: str) -> bool:
    """Return whether a text names a quantity (and isn't a formula of one): x, f(2), |AB|, P(X=4), \\cos A, V_1:V_2."""
    text = text.strip()
    if bool(_NAMES.fullmatch(text)) and not _NOT_A_NAME.match(text):
        return True
    if text.startswith((r"\int", r"\sum", r"\prod", r"\lim")):
        return not any(split_top(text, _COMPARED)[1:])
    parts = split_top(text, _COLON)
    if len(parts) > 1:
        return all(map(is_name, parts))
    called = _CALL.fullmatch(text)
    if called and (called[1] or not has_letters(called[2])):
        return True
    return any(pattern.fullmatch(text) for pattern in _QUANTITIES)


def has_letters(text: str) -> bool:
    return bool(letters_of(text))


def letters_of(text: str) -> frozenset[str]:
    return frozenset(_LETTER.findall(_COMMAND_OR_CONSTANT.sub(" ", text)))


def plain_name(name: str) -> str:
    return re.sub(r"[\s{}|]|\\text|\\overline", "", name).strip("()").casefold() if len(name) > 1 else name
