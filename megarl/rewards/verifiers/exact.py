"""`exact`: the answer is the text that the ground truth gives."""

from __future__ import annotations

import regex

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import Extract, TagName, Text, answer_part, extract

_ASCII = str.maketrans("−–—‐‑‒﹣－＋．，：∶／∕⁄％＝＜＞’＇", "--------+.,::///%=<>''")
_GROUPED = regex.compile(r"(?<![\d.,])\d{1,3}([,'_])\d{3}(?:\1\d{3})*+(?![\d,'_])")
_OPERATORS = r"\-+±*×·⋅/÷:^=<>≤≥≠≈√"
# What neither writes a word nor a number, and what of an operator, point or percent sign does write a number.
_MARKS = regex.compile(rf"[^\p{{L}}\p{{M}}\p{{N}}\s.%‰∞{_OPERATORS}]+")
_PARTS_OF_NUMBERS = regex.compile(
    rf"""
    (?P<kept>
        (?<=\p{{N}}) \.(?=\d)  # 1.5
      | (?<=\p{{N}}) \s*+ [%‰]  # 50 %
      | (?<![\p{{L}}\p{{N}}]) [\-±√<>≤≥≠]=? (?=\.?[\p{{N}}∞] | \p{{L}}\b | [dt]?frac | sqrt)  # -5, -x
      | (?<![\p{{L}}\p{{N}}]\s?) [\-±√<>≤≥≠]=? \s++ (?=\.?[\p{{N}}∞])  # - 5
      | (?<=[\p{{N}}∞]|\b\p{{L}}|\p{{N}}\p{{L}})  # 1/2, x-5, 1e-5, but not the two numbers in "1 -5"
        \s*+ (?!(?<=\s)-\S) [{_OPERATORS}]++ \s*+ (?=-?\.?[\p{{N}}∞])
      | (?<=[\p{{N}}∞]) \s*+ (?!(?<=\s)-\S) [{_OPERATORS}]++ \s*+ (?=\p{{L}}\b)  # 5-x
    )
  | (?P<point> (?<![\p{{L}}\p{{N}}.]) \. (?=\d) )  # .5
  | \.++ | [%‰{_OPERATORS}]
    """,
    regex.VERBOSE,
)


@verifier(run_in="inline")
def exact(
    response: Response,
    ground_truth: GroundTruth,
    *,
    extraction: Extract = "auto",
    answer_marker: Text = "Answer:",
    tag: TagName = "answer",
    ignore_case: bool = False,
    ignore_space: bool = True,
    ignore_punctuation: bool = False,
) -> Score:
    """Return 1 if the answer is the ground truth's text, else 0.

    ground_truth: {"answer": text or number}, or a list of them, any of which is right.
    extraction, answer_marker, tag: where the answer stands, see `extraction.extract`.
    ignore_space: runs of white space count as one space, those at the ends as none.
    ignore_punctuation: see `without_punctuation`.
    """

    def normal(text: str) -> str:
        text = text.casefold() if ignore_case else text
        text = without_punctuation(text) if ignore_punctuation else text
        return " ".join(text.split()) if ignore_space else text

    golds = [normal(gold) for gold in texts_of(ground_truth)]
    answer = extract(answer_part(response), extraction, marker=answer_marker, tag=tag)
    if not answer or not normal(answer):
        return Score(0.0, reason="no answer found")
    return Score(float(normal(answer) in golds))


def without_punctuation(text: str) -> str:
    """Return the text without its marks, as SQuAD's and TriviaQA's scripts do, but for those that write a number.

    "well-known", "U.S." and "$5" become "wellknown", "US" and "5". Those scripts also take -5, 1.5 and 1/2 for 5, 15
    and 12. Here a number keeps its sign, point and percent sign, and what stands between it and another number or a
    single letter (1/2, 3:2, 10-20, 2^3, x=5, 1e-5); "1,000" becomes "1000", other marks between two digits a space. A
    text of marks alone stays as it is.
    """

    def dropped(match: regex.Match[str]) -> str:
        whole = match.string
        beside = whole[max(match.start() - 1, 0) : match.start()], whole[match.end() : match.end() + 1]
        return " " if all(map(str.isnumeric, beside)) else ""

    def part(match: regex.Match[str]) -> str:
        return "".join((match["kept"] or "").split()) or ("0." if match["point"] else dropped(match))

    given, text = text, _GROUPED.sub(lambda match: regex.sub(r"\D", "", match[0]), text.translate(_ASCII))
    text = _PARTS_OF_NUMBERS.sub(part, _MARKS.sub(dropped, text))
    return text if text.strip() else given


def texts_of(ground_truth: GroundTruth, key: str = "answer") -> list[str]:
    """Return the ground truth's answer or answers, as texts."""
    given = ground_truth.get(key)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        number = isinstance(one, (int, float)) and not isinstance(one, bool) and one == one
        if not number and not (isinstance(one, str) and one.strip()):
            raise BadGroundTruth(f"{key!r} is {given!r}: a text or number, or a list of them, is needed")
    if not found:
        raise BadGroundTruth(f"{key!r} is an empty list")
    return [str(one) for one in found]
