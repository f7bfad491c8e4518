"""Units behind a number or formula: what counts as one, and one name for its many spellings."""

from __future__ import annotations

import re

# Spelling -> name. Singular forms; plurals are folded by `_singular`.
_NAMES = {
    spelling: names.split()[0]
    for names in (
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "mm millimeter millimetre",
        "in inch",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "g gram gm",
        "kg kilogram",
        "mg milligram",
        "lb pound lbs",
        "oz ounce",
        "l liter litre",
        "ml milliliter millilitre",
        "s second sec",
        "min minute",
        "h hour hr",
        "day",
        "week",
        "month",
        "year yr",
        "dollar usd buck",
        "euro eur",
        "cent",
        "degree deg",
        "radian rad",
        "percent pct percentage",
        "gallon gal",
        "hertz hz",
        "newton",
        "joule",
        "watt",
        "volt",
        "ohm",
        "way",
        "unit",
        "egg",
        "man men",
        "square sq",
        "cubic cu",
    )
    for spelling in names.split()
}
_COMPOUND = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "cc": "cm3"}
_POWER_BEFORE = {"square": "2", "cubic": "3"}
_POWER_AFTER = {"squared": "2", "cubed": "3"}

_TOKEN = re.compile(
    r"\s*(?:\\text\s*\{(?P<text>[^{}\\$]*)\}"
    r"|(?P<degree>\^\{\\circ\})"
    r"|\^\s*(?:\{\s*(?P<braced>-?[1-3])\s*\}|(?P<power>-?[1-3]))"
    r"|(?P<per>/|\bper\b|\\cdot(?![a-zA-Z]))"
    r"|(?P<word>[A-Za-zµΩ]+\.?))"
)
# Plain words that may follow a number and mean something else.
_NOT_UNITS = re.compile(
    "and|or|mod|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|arc(?:sin|cos|tan)|to|is|if|when|where|for|with|from"
    "|times|plus|minus|over|choose|factorial"
)
# Behind a number these change its value, so "12 million" is neither 12 nor 12 apples.
_SCALES = frozenset(["half", "hundred", "thousand", "million", "billion", "trillion", "dozen"])
# What makes more of a number than an amount, even set as text: "12 or less", "12 x".
_NO_AMOUNT = re.compile(r"\b(?:or|and|to|not|than|if|mod|pi|[xyzn])\b|!", re.IGNORECASE)


def read_unit(tail: str, *, spaced: bool) -> str | None:
    """Return the name of the unit that `tail` spells from beginning to end, "" if it is blank, None if it is none.

    spaced: white space stood between the number and the tail. A plain word counts as a unit if it is a known one,
    or a spaced word of four letters or more ("5 apples"); single letters are variables unless set as text.
    """
    if not tail.strip():
        return ""
    words: list[str] = []
    position = 0
    while position < len(tail):
        match = _TOKEN.match(tail, position)
        if match is None:
            return None if tail[position:].strip() else _compose(words)
        if not words and not (match["text"] or match["degree"] or match["word"]):
            return None  # "2^3" and "1/2" are no units
        if match["text"] is not None:
            if re.search(r"[0145-9=<>+]", match["text"]) or _NO_AMOUNT.search(match["text"]):
                return None
            words += re.findall(r"[a-zµω]+|/|[23]", match["text"].casefold())
        elif match["degree"]:
            words.append("degree")
        elif power := match["braced"] or match["power"]:
            words.append(power)
        elif match["per"]:
            words.append("/" if match["per"] != r"\cdot" else "*")
        elif not _is_unit_word(match["word"].rstrip(".").casefold(), spaced or bool(words)):
            return None
        else:
            words.append(match["word"].rstrip(".").casefold())
        position = match.end()
    return None if words and words[0] in _POWER_AFTER else _compose(words)  # "12 squared" is 144


def changes_value(unit: str) -> bool:
    """Return whether a unit's name changes the value before it."""
    return not _SCALES.isdisjoint(unit.split())


def split_unit(text: str) -> tuple[str, str]:
    r"""Return a formula and the unit (set as `\text{...}` or a degree sign) behind it, "" for none."""
    for match in re.finditer(r"\\text\s*\{|\^\{\\circ\}", text):
        if match.start() > 0 and text[: match.start()].strip():
            unit = read_unit(text[match.start() :], spaced=True)
            if unit:
                return text[: match.start()].strip(), unit
    return text, ""


def _is_unit_word(word: str, spaced: bool) -> bool:
    if _NOT_UNITS.fullmatch(word):
        return False
    single = _singular(word)
    known = single in _NAMES or single in _COMPOUND or word in _POWER_AFTER
    return (known and len(word) > 1) or (spaced and len(word) >= 4)


def _singular(word: str) -> str:
    if word in _NAMES or word in _COMPOUND:
        return word
    for ending in ("es", "s"):
        if word.endswith(ending) and word[: -len(ending)] in _NAMES:
            return word[: -len(ending)]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _compose(words: list[str]) -> str:
    out: list[str] = []
    power = ""
    for word in words:
        name = _singular(word)
        name = _COMPOUND.get(name, _NAMES.get(name, name))
        if name == "per":
            name = "/"
        if name in _POWER_BEFORE:
            power = _POWER_BEFORE[name]
        elif re.fullmatch(r"-?[1-3]", word) or word in _POWER_AFTER:
            if out:
                out[-1] += _POWER_AFTER.get(word, word)
        else:
            out.append(name + power)
            power = ""
    if power:
        out.append(f"unit{power}")
    return " ".join(out).replace(" / ", "/").replace(" * ", "*")
