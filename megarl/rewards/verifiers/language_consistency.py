"""`language_consistency`: the response is written in the script of the language that it should have."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from megarl.errors import did_you_mean
from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier

IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_UNITS = re.compile(rf"[{IDEOGRAPHS}]|[^\W\d_{IDEOGRAPHS}]+")
# What is in Latin letters in every language.
_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?(?:\$\$|\Z)|\$[^$\n]*\$|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)"
    r"|\\[a-zA-Z]+(?:\{[^{}]*\})*|</?\w+>|<\|[^|\s]*\|>|https?://\S+",
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


def _check_language(*, language: str = "prompt") -> None:
    if language not in ("prompt", "ground_truth"):
        _scripts_of(language)


@verifier(run_in="inline", check=_check_language)
def language_consistency(response: Response, ground_truth: GroundTruth, *, language: str = "prompt") -> Score:
    """Return the share of words (an ideogram is one) written in the language's script; 1 without words.

    language: a code such as `en` or `zh`, `prompt` for the script that the prompt is mostly written in, or
        `ground_truth` for the ground truth's "language". Formulas, code, tags and addresses don't count.
    Languages of one script are not told apart.
    """
    if language == "prompt":
        scripts = _main_script(response.prompt)
        if scripts is None:
            return Score(None, reason="the prompt has no words to tell its language by")
    else:
        given = str(ground_truth.get("language", "")) if language == "ground_truth" else language
        scripts = _scripts_of(given)
    words = _words(response.text)
    if not words:
        return Score(1.0)
    return Score(sum(_script(word) in scripts for word in words) / len(words))


def _scripts_of(code: str) -> list[str]:
    if code not in _SCRIPT_OF:
        hint = did_you_mean(code, [*_SCRIPT_OF, "ground_truth"])
        known = ", ".join(sorted(_SCRIPT_OF))
        raise BadGroundTruth(f"language_consistency: unknown language {code!r}.{hint} Known: {known}")
    return _SCRIPT_OF[code]


def _main_script(text: str) -> list[str] | None:
    counts = Counter(_script(word) for word in _words(text))
    if not counts:
        return None
    kana = counts["HIRAGANA"] + counts["KATAKANA"]
    japanese = kana > counts["CJK"] / 10
    if japanese:
        counts["CJK"] += kana
        del counts["HIRAGANA"], counts["KATAKANA"]
    main = max(counts, key=lambda script: counts[script])
    return _SCRIPT_OF["ja"] if main == "CJK" and japanese else [main]


def _words(text: str) -> list[str]:
    return _UNITS.findall(_NOT_PROSE.sub(" ", text))


def _script(word: str) -> str:
    """Return the script of a word's first letter, as Unicode names it."""
    name = unicodedata.name(word[0], "")
    return "LATIN" if name.startswith(("LATIN", "FULLWIDTH LATIN")) else name.split(" ")[0].split("-")[0]
