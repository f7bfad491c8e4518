"""The math verifier: a table of verdicts with reasons, and the properties no table can exhaust."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sympy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megarl.rewards import Response, verify
from megarl.rewards.extraction import answer_part, last_box
from megarl.rewards.verifiers.math import equivalent, math
from megarl.rewards.verifiers.math.algebra import parse_formula
from megarl.rewards.verifiers.math.answer import Formula, read
from megarl.rewards.verifiers.math.text import tidy
from megarl.rewards.verifiers.math.zero import equal

TABLE = Path(__file__).parents[2] / "fixtures" / "math_verdicts.jsonl"
ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
TOPICS = sorted({row["topic"] for row in ROWS})


def verdict(row: dict, mode: str) -> bool:
    text = row["response"] if "response" in row else rf"So \boxed{{{row['answer']}}}."
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in row.get("options", {}).items()}
    response = Response(text, prompt=row.get("prompt", ""))
    return bool(math(response, {"answer": row["gold"]}, mode=mode, **options).value)


def test_the_table_is_large_and_each_row_gives_its_reason():
    assert len(ROWS) >= 400
    assert all(row["why"].strip() for row in ROWS)
    asked = ("gold", "answer", "response", "options", "prompt")
    seen = {json.dumps([row.get(key) for key in asked]) for row in ROWS}
    assert len(seen) == len(ROWS), "a row stands twice"
    share = sum(row["strict"] for row in ROWS) / len(ROWS)
    assert 0.3 < share < 0.7, "a table of one verdict would prove little"


@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize("topic", TOPICS)
def test_every_row_of_the_table_gets_its_verdict(topic, mode):
    wrong = [row for row in ROWS if row["topic"] == topic and verdict(row, mode) != row[mode]]
    assert not wrong, "\n".join(f"{row.get('answer', row.get('response'))!r}: {row}" for row in wrong)


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_swapping_gold_and_answer_changes_no_verdict_of_the_table(mode):
    for row in ROWS:
        if "answer" in row and isinstance(row["gold"], str) and not row.get("options"):
            forth = equivalent(row["gold"], row["answer"], mode=mode)
            assert forth == equivalent(row["answer"], row["gold"], mode=mode), row


# Answers of every kind, built from parts, so that properties are tried on shapes nobody wrote down.
INTEGERS = st.integers(-(10**6), 10**6).map(str)
DECIMALS = st.tuples(st.integers(-999, 999), st.integers(0, 999)).map(lambda p: f"{p[0]}.{p[1]:03d}")
FRACTIONS = st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}")
NUMBERS = st.one_of(INTEGERS, DECIMALS, FRACTIONS)
FORMULAS = st.sampled_from(
    [r"\sqrt{2}", r"2\pi", r"x^2+1", r"\frac{x}{2}", r"3+2i", r"\ln 2", r"a_1+a_2", r"2^{n+1}", r"|x-1|"]
)
WORDS = st.sampled_from(["Friday", "no solution", "east", r"\text{Evelyn}", "B"])
ATOMS = st.one_of(NUMBERS, NUMBERS, FORMULAS)
LISTS = st.lists(ATOMS, min_size=2, max_size=4)
ANSWERS = st.one_of(
    ATOMS,
    WORDS,
    LISTS.map(", ".join),
    LISTS.map(lambda parts: rf"\{{{', '.join(parts)}\}}"),
    LISTS.map(lambda parts: f"({', '.join(parts)})"),
    st.tuples(st.sampled_from("(["), NUMBERS, NUMBERS, st.sampled_from(")]")).map(
        lambda p: f"{p[0]}{p[1]}, {p[2]}{p[3]}"
    ),
    NUMBERS.map(lambda n: f"x = {n}"),
    NUMBERS.map(lambda n: rf"x \ge {n}"),
    NUMBERS.map(lambda n: rf"{n}\text{{ cm}}"),
    NUMBERS.map(lambda n: rf"{n}\%"),
    st.lists(NUMBERS, min_size=4, max_size=4).map(
        lambda n: rf"\begin{{pmatrix}}{n[0]} & {n[1]} \\ {n[2]} & {n[3]}\end{{pmatrix}}"
    ),
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(ANSWERS)
def test_an_answer_equals_itself(answer):
    assert equivalent(answer, answer)


@quick
@given(ANSWERS, ANSWERS, st.sampled_from(["strict", "lenient"]))
def test_equivalence_is_symmetric(left, right, mode):
    assert equivalent(left, right, mode=mode) == equivalent(right, left, mode=mode)


@quick
@given(ANSWERS, ANSWERS)
def test_what_is_strictly_equal_is_leniently_equal(left, right):
    if equivalent(left, right):
        assert equivalent(left, right, mode="lenient")


@quick
@given(ANSWERS | st.text(max_size=60))
def test_tidying_any_text_ends_and_is_idempotent(text):
    assert tidy(tidy(text)) == tidy(text)


@quick
@given(ANSWERS, st.data())
def test_spaces_and_tex_spacing_change_no_verdict(answer, data):
    gaps = [m.start() for m in re.finditer(r"(?<=[=+<>(\[,&|])|(?=[=+<>)\],&|])", answer)] + [0, len(answer)]
    positions = data.draw(st.lists(st.sampled_from(gaps), max_size=3, unique=True))
    space = data.draw(st.sampled_from([" ", "  ", r"\,", r"\;", r"\quad ", "~", "\n", r"\!"]))
    spaced = answer
    for position in sorted(positions, reverse=True):
        spaced = spaced[:position] + space + spaced[position:]
    assert equivalent(answer, spaced), (answer, spaced)


WRAPPERS = [r"${}$", r"\({}\)", r"\[{}\]", "  {}\n", "{}.", r"\displaystyle {}", r"\boxed{{{}}}", r"{}\,"]


@quick
@given(ANSWERS, st.sampled_from(WRAPPERS))
def test_delimiters_and_a_full_stop_change_no_verdict(answer, wrapper):
    assert equivalent(answer, wrapper.format(answer))


@quick
@given(st.lists(ATOMS, min_size=2, max_size=4, unique=True), st.randoms())
def test_a_set_is_unordered_and_a_tuple_is_not(parts, random):
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert equivalent(rf"\{{{', '.join(parts)}\}}", rf"\{{{', '.join(shuffled)}\}}")
    same = all(equivalent(x, y) for x, y in zip(parts, shuffled, strict=True))
    assert equivalent(f"({', '.join(parts)})", f"({', '.join(shuffled)})") == same


@quick
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_numbers_are_compared_exactly(a, b):
    left, right = f"{a.numerator}/{a.denominator}", f"{b.numerator}/{b.denominator}"
    assert equivalent(left, right) == (a == b)


@quick
@given(st.integers(0, 10**15))
def test_grouping_thousands_properly_changes_no_number(value):
    assert equivalent(str(value), f"{value:,}")
    assert equivalent(str(value), f"{value:,}".replace(",", "{,}"))


@quick
@given(st.integers(1000, 10**9), st.integers(1, 8))
def test_a_comma_anywhere_else_makes_another_answer(value, position):
    digits = str(value)
    position = min(position, len(digits) - 1)
    if digits[:position] + "," + digits[position:] != f"{value:,}":
        assert not equivalent(digits, digits[:position] + "," + digits[position:])


@quick
@given(st.text(alphabet=st.characters(blacklist_characters="\\{}<"), max_size=80), ANSWERS)
def test_what_stands_around_the_box_does_not_matter(around, answer):
    assert math(Response(rf"{around}\boxed{{{answer}}}{around}"), {"answer": answer}).value == 1.0


@quick
@given(st.text(alphabet="\\{}boxedfrac 12", max_size=60))
def test_the_box_found_is_closed_and_its_braces_balance(text):
    found = last_box(text)
    if found is not None:
        bare = re.sub(r"\\.", "", found, flags=re.DOTALL)
        assert bare.count("{") == bare.count("}")
        assert found in text


def test_without_an_accepted_form_there_is_no_credit_and_the_reason_says_so():
    score = math(Response("so 5, clearly 5"), {"answer": "5"})
    assert score.value == 0.0
    assert score.reason == "no final answer"
    assert score.parts == {"answered": 0.0}
    assert math(Response(r"\boxed{}"), {"answer": "5"}).reason == "empty answer"


@pytest.mark.parametrize(
    "answer", [None, "", "  ", float("nan"), float("inf"), True, [], {"a": 1}, ["5", None]]
)
def test_a_ground_truth_without_an_answer_is_a_bad_one(answer):
    score = verify("math", r"\boxed{5}", {"answer": answer})
    assert score.value is None
    assert "bad ground truth" in score.reason


def test_comparing_by_digits_agrees_with_simplification():
    decided = 0
    for row in ROWS:
        if row["topic"] not in ("algebra", "roots and constants", "fractions", "field", "scientific"):
            continue
        sides = [read(tidy(str(row[side]))) for side in ("gold", "answer")]
        if not all(isinstance(side, Formula) for side in sides):
            continue  # never left for algebra
        pair = [parse_formula(side.latex) for side in sides]
        if all(isinstance(side, sympy.Expr) and side.is_finite is not False for side in pair):
            decided += 1
            assert equal(*pair) == (sympy.simplify(pair[0] - pair[1]) == 0), row
    assert decided > 30


TERMS = st.sampled_from(["2", "3", "12", "x", "y", r"\pi", r"\sqrt{2}", r"\sqrt{12}", "i", "1.5", "e"])
SUMS = st.recursive(
    TERMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", r" \cdot "]), inner).map(
            lambda p: f"({p[0]}{p[1]}{p[2]})"
        ),
        st.tuples(inner, st.sampled_from("0123")).map(lambda p: f"({p[0]})^{p[1]}"),
        st.tuples(inner, TERMS).map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"),
        inner.map(lambda x: f"-({x})"),
    ),
    max_leaves=5,
)


@quick
@given(SUMS, SUMS)
@example("x", "i")  # math-verify's x is another where there is an i
def test_a_formula_stays_equal_when_another_is_added_and_taken_away_and_not_when_anything_is_added(
    left, right
):
    assert equivalent(left, f"({left})+({right})-({right})")
    assert not equivalent(left, f"({left})+2^{{-200}}")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1"),
        (r"\frac{1}{\sqrt{2}+\sqrt{3}+i}", r"\frac{\sqrt{2}+\sqrt{3}-i}{6+2\sqrt{6}}"),
        (r"\sqrt{-4}", "2i"),
        (r"\sqrt{\frac{2}{3}}", r"\frac{\sqrt{6}}{3}"),
        (r"\sqrt{720720}", r"12\sqrt{5005}"),
        ("i^2", "-1"),
        (r"\frac{x^3}{x}", "x^{2}"),
        ("-x^2", "-(x^2)"),
        ("2(3+x)", "6+2x"),
        ("1/2/2", "0.25"),
    ],
)
def test_two_forms_of_one_value_are_equal_and_another_value_is_not(left, right):
    assert equivalent(left, right)
    assert not equivalent(left, f"({right})+1")


def test_the_verifier_works_in_threads_at_once():
    rows = [row for row in ROWS if row["topic"] in ("algebra", "roots and constants")] * 2
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda row: verdict(row, "strict"), rows))
    assert verdicts == [row["strict"] for row in rows]


MEGABYTE = 2**20
LONG = {
    "unclosed boxes": r"\boxed{" * (MEGABYTE // 7),
    "closed boxes": r"\boxed{5}" * (MEGABYTE // 9),
    "nested boxes": r"\boxed{" * 50_000 + "5" + "}" * 50_000,
    "open braces": "{" * MEGABYTE,
    "backslashes": "\\" * MEGABYTE,
    "one long box": r"\boxed{" + "1+" * (MEGABYTE // 2) + "1}",
    "thinking tags": "<think>" * 70_000 + "</think>" * 70_000,
    "end-of-sequence strings": "</s>" * 250_000,
    "answer phrases": "the answer is " * 70_000,
    "an answer phrase and blanks": "the answer is" + " " * MEGABYTE + "\n",
    "answer lines": "Answer:\n" * 120_000,
    "bold signs": "*" * MEGABYTE,
    "the start of a phrase": "the " * 250_000,
    "blanks": " " * MEGABYTE,
    "commas in a box": r"\boxed{" + "," * 1990 + "}",
    "brackets in a box": r"\boxed{" + "([" * 900 + "}",
    "plus-minus in a box": r"\boxed{" + r"\pm" * 600 + "}",
    "plus-minus glued to letters in a box": r"\boxed{" + r"x\pmx" * 12 + "}",
    "a set of many formulas in a box": r"\boxed{\{" + ",".join(rf"\sin {n}" for n in range(180)) + r"\}}",
    "fractions in a box": r"\boxed{" + r"\frac" * 380 + "}",
    "text in a box": r"\boxed{5" + r"\text{a}" * 240 + "}",
    "relations in a box": r"\boxed{" + "x=" * 900 + "}",
    "spaces in a box": r"\boxed{1" + " " * 1900 + "1}",
    "digits in a box": r"\boxed{" + "9" * 1990 + "}",
    "groups in a box": r"\boxed{" + "1" + ",000" * 490 + "}",
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.timeout(60)
def test_a_long_response_is_read_in_linear_time(name, mode):
    """In milliseconds; what tries every way to read it would not end."""
    score = math(Response(LONG[name]), {"answer": "7"}, mode=mode)
    assert score.value == 0.0


def test_end_of_sequence_strings_and_thinking_are_cut_wherever_the_template_opened_them():
    def part(text: str, prompt: str = "") -> str:
        return answer_part(Response(text, prompt=prompt))

    assert part("a</think>b</s>\n</s>") == "b"
    assert part("a</think>b", "Q <think>\n") == "b"
    assert part("a", "Q <think>\n") == ""
    assert part("x <think>a</think> y <think>b") == "x   y"
