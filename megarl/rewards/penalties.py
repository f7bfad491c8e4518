"""`length`, `repetition`, `language_consistency`: how an answer is given, whatever it says."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

from pydantic import Field

from megarl.errors import UserError, did_you_mean
from megarl.rewards.registry import BadReference, Reference, Response, Score, verifier

Unit = Literal["tokens", "words", "characters"]

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_UNITS = re.compile(rf"[{_IDEOGRAPHS}]|[^\W\d_{_IDEOGRAPHS}]+")
_WORDS = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")
# A run of signs without a space is cut, and a long one of blanks counts, so that "aaaa..." is a loop, too.
_PIECES = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]{{1,20}}|\s{{20}}")
# What is in Latin letters in every language.
_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?(?:\$\$|\Z)|\$[^$\n]*\$|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)"
    r"|\\[a-zA-Z]+(?:\{[^{}]*\})*|</?\w+>|https?://\S+",
    re.DOTALL,
)
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "LATIN": ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "tr", "vi", "id", "sv", "cs", "ro"),
    "CJK": ("zh",),
    "CJK HIRAGANA KATAKANA": ("ja",),
    "HANGUL": ("ko",),
    "CYRILLIC": ("ru", "uk", "bg", "sr"),
    "ARABIC": ("ar", "fa", "ur"),
    "HEBREW": ("he",),
    "GREEK": ("el",),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "BENGALI": ("bn",),
    "TAMIL": ("ta",),
    "THAI": ("th",),
}
_SCRIPT_OF = {language: scripts.split() for scripts, languages in _SCRIPTS.items() for language in languages}


def _check_length(*, start: int, end: int, least: int = 0, **_: object) -> None:
    if not 0 <= least <= start < end:
        raise UserError(f"length: 0 <= least <= start < end is needed, not {least}, {start}, {end}")


@verifier(place="inline", check=_check_length)
def length(
    response: Response,
    reference: Reference,
    *,
    start: int,
    end: int,
    least: int = 0,
    unit: Unit = "tokens",
) -> Score:
    """0 up to `start`, falling in a straight line to -1 at `end`; also -1 below `least`.

    As a shaping part it is weighed like any other. DAPO's soft overlong punishment has this form too, but
    belongs after the grouping decisions: the training loop adds it (see `megarl.rollout.filters`).
    """
    if unit == "tokens":
        if response.tokens is None:
            return Score(None, reason="the response's tokens are not known; count words or characters")
        amount = response.tokens
    else:
        amount = len(_WORDS.findall(response.text)) if unit == "words" else len(response.text)
    if amount < least:
        return Score(-1.0, reason="too short")
    return Score(-min(max((amount - start) / (end - start), 0.0), 1.0))


@verifier(place="inline")
def repetition(
    response: Response,
    reference: Reference,
    *,
    ngram: Annotated[int, Field(ge=1)] = 6,
    allowed: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    unit: Literal["words", "characters"] = "words",
) -> Score:
    """0 while at most a share `allowed` of the n-grams has occurred before, falling to -1 when all of them
    have.

    An ideogram is a word; one longer than 20 characters is cut into such pieces.
    Part `share`: the share of repeated n-grams. Linear in the text.
    """
    units: list[str] = _PIECES.findall(response.text) if unit == "words" else list(response.text)
    total = len(units) - ngram + 1
    if total <= 0:
        return Score(0.0, {"share": 0.0})
    share = 1.0 - len({tuple(units[i : i + ngram]) for i in range(total)}) / total
    return Score(-max(share - allowed, 0.0) / (1.0 - allowed), {"share": share})


def _check_language(*, language: str = "prompt") -> None:
    if language not in ("prompt", "reference"):
        _scripts_of(language)


@verifier(place="inline", check=_check_language)
def language_consistency(response: Response, reference: Reference, *, language: str = "prompt") -> Score:
    """The share of words (an ideogram is one) written in the language's script: 1 for all or for no words at
    all.

    language: a code such as `en` or `zh`, `prompt` for the script that the prompt is mostly written in, or
        `reference` for the reference's "language". Formulas, code, tags and addresses don't count.
    Languages of one script are not told apart.
    """
    if language == "prompt":
        scripts = _main_script(response.prompt)
        if scripts is None:
            return Score(None, reason="the prompt has no words to tell its language by")
    else:
        scripts = _scripts_of(str(reference.get("language", "")) if language == "reference" else language)
    words = _UNITS.findall(_NOT_PROSE.sub(" ", response.text))
    if not words:
        return Score(1.0)
    return Score(sum(_script(word) in scripts for word in words) / len(words))


def _scripts_of(code: str) -> list[str]:
    if code not in _SCRIPT_OF:
        hint = did_you_mean(code, _SCRIPT_OF)
        known = ", ".join(sorted(_SCRIPT_OF))
        raise BadReference(f"language_consistency: unknown language {code!r}.{hint} Known: {known}")
    return _SCRIPT_OF[code]


def _main_script(text: str) -> list[str] | None:
    counts: dict[str, int] = {}
    for word in _UNITS.findall(_NOT_PROSE.sub(" ", text)):
        script = _script(word)
        counts[script] = counts.get(script, 0) + 1
    if not counts:
        return None
    if counts.get("HIRAGANA", 0) + counts.get("KATAKANA", 0) > counts.get("CJK", 0) / 10:
        for script in ("HIRAGANA", "KATAKANA"):
            counts["CJK"] = counts.get("CJK", 0) + counts.pop(script, 0)
        japanese = True
    else:
        japanese = False
    main = max(counts, key=lambda script: counts[script])
    return _SCRIPT_OF["ja"] if main == "CJK" and japanese else [main]


def _script(word: str) -> str:
    """The script of a word's first letter, as Unicode names it."""
    name = unicodedata.name(word[0], "")
    return "LATIN" if name.startswith(("LATIN", "FULLWIDTH LATIN")) else name.split(" ")[0].split("-")[0]
