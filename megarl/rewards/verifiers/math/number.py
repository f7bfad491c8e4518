"""Numbers as people write them, read exactly: every one becomes a fraction, never a float.

Thousands are grouped only as `\\d{1,3}(,\\d{3})+`. Leading zeros, signs, decimals, fractions, mixed
fractions, repeating decimals (`0.\\overline{3}`), scientific notation, percent signs, units, currency and
bases are understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from megarl.rewards.verifiers.math.units import read_unit

MAX_CHARACTERS = 1000  # anything longer is no number but a formula


@dataclass(frozen=True)
class Number:
    """A number with the way it was written.

    value: exact; for a percentage, what stands before the sign.
    decimals: digits after the point, None unless written as a decimal. significant: significant digits written.
    unit: normalised, "" for none; `base8` for digits in another base, which are compared as digits.
    """

    value: Fraction
    decimals: int | None = None
    significant: int = 0
    percent: bool = False
    unit: str = ""


_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+|\.(?!\d))?|\.\d+)"
_SIGN = r"[-+]?\s*"

_SCIENTIFIC = re.compile(
    rf"(?P<sign>{_SIGN})(?:(?P<digits>{_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*"
    rf"(?:\{{\s*(?P<braced>{_SIGN}\d{{1,4}})\s*\}}|(?P<exponent>{_SIGN}\d{{1,4}}))(?!\d)"
)
_MIXED = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<whole>\d+)\s*"
    r"(?:\\frac\{\s*(?P<top>\d+)\s*\}\{\s*(?P<bottom>\d+)\s*\}|\s(?P<plain_top>\d+)\s*/\s*(?P<plain_bottom>\d+))"
)
_REPEATING = re.compile(
    rf"(?P<sign>{_SIGN})(?P<whole>\d*)\.(?P<fixed>\d*)\\overline\s*\{{\s*(?P<period>\d{{1,50}})\s*\}}"
)
_FRACTION = re.compile(
    rf"(?P<sign>{_SIGN})(?:\\frac\{{\s*(?P<top>{_SIGN}{_DECIMAL})\s*\}}\{{\s*(?P<bottom>{_SIGN}{_DECIMAL})\s*\}}"
    rf"|\(?\s*(?P<plain_top>{_DECIMAL})\s*\)?\s*/\s*\(?\s*(?P<plain_bottom>{_SIGN}{_DECIMAL})\s*\)?)"
)
_PLAIN = re.compile(rf"(?P<sign>{_SIGN})(?P<digits>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,4}})(?!\d))?")
_BASE = re.compile(
    r"\(?(?P<digits>[-+]?[\d ]*\d)\)?\s*_\s*\{?\s*(?:\\text\s*\{\s*)?"
    r"(?P<base>\d{1,2}|two|three|five|eight|sixteen)[\s}]*"
)
_PERCENT = re.compile(r"\s*(?:%|\\text\s*\{\s*(?:percent|pct|%)\s*\}|percent(?:age)?|pct)\s*(?:points?)?")
_BASES = {"two": "2", "three": "3", "five": "5", "eight": "8", "sixteen": "16"}


def read_number(text: str) -> Number | None:
    """Return the number that a tidy text is, with its percent sign or unit; None if it is anything else."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS or not text or text[0] not in "-+.0123456789\\(":
        return None
    if (based := _BASE.fullmatch(text)) is not None:
        return _in_base(based)
    for pattern, value_of in (
        (_SCIENTIFIC, _scientific),
        (_MIXED, _mixed),
        (_REPEATING, _repeating),
        (_FRACTION, _fraction),
        (_PLAIN, _plain),
    ):
        match = pattern.match(text)
        if match is None:
            continue
        number = value_of(match)
        tail = text[match.end() :]
        if number is None:
            return None
        if not tail:
            return number
        if _PERCENT.fullmatch(tail):
            return replace(number, percent=True)
        unit = read_unit(tail, spaced=tail[0] == " ")
        if unit is not None:
            return replace(number, unit=unit)
    return None


def _plain(match: re.Match[str]) -> Number:
    return _decimal(match["sign"], match["digits"], int(match["exponent"] or 0))


def _scientific(match: re.Match[str]) -> Number:
    exponent = int((match["braced"] or match["exponent"]).replace(" ", ""))
    return _decimal(match["sign"], match["digits"] or "1", exponent)


def _decimal(sign: str, digits: str, exponent: int) -> Number:
    whole, _, fraction = digits.replace(",", "").partition(".")
    value = Fraction(int((whole or "0") + fraction)) * Fraction(10) ** (exponent - len(fraction))
    decimals = max(len(fraction) - exponent, 0) if fraction or exponent < 0 else None
    return Number(_signed(sign, value), decimals, len((whole + fraction).lstrip("0")))


def _mixed(match: re.Match[str]) -> Number | None:
    top, bottom = int(match["top"] or match["plain_top"]), int(match["bottom"] or match["plain_bottom"])
    if bottom == 0 or top >= bottom:
        return None
    return Number(_signed(match["sign"], int(match["whole"]) + Fraction(top, bottom)))


def _repeating(match: re.Match[str]) -> Number:
    fixed, period = match["fixed"], match["period"]
    scale = 10 ** len(fixed)
    tail = Fraction(int(fixed or "0"), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return Number(_signed(match["sign"], int(match["whole"] or "0") + tail))


def _fraction(match: re.Match[str]) -> Number | None:
    top = _value(match["top"] or match["plain_top"])
    bottom = _value(match["bottom"] or match["plain_bottom"])
    return Number(_signed(match["sign"], top / bottom)) if bottom else None


def _in_base(match: re.Match[str]) -> Number | None:
    base = int(_BASES.get(match["base"], match["base"]))
    digits = match["digits"].replace(" ", "")
    if not 2 <= base <= 36 or any(int(digit) >= base for digit in digits.lstrip("+-")):
        return None
    return Number(Fraction(int(digits)), unit=f"base{base}")


def _value(text: str) -> Fraction:
    text = text.strip()
    return _decimal("-" if text.startswith("-") else "", text.lstrip("+-").strip(), 0).value


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign.strip() == "-" else value
