"""The math verifier against cases of the field's graders and of our own: near misses, notations, and bombs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import sympy

from benchmarks.off_by_one import FORMS, accepted, draw
from megarl.rewards import Response, verify
from megarl.rewards.verifiers import math as package
from megarl.rewards.verifiers.math import equivalent, math
from megarl.rewards.verifiers.math.deadline import OutOfTime, processor_seconds
from megarl.rewards.verifiers.math.zero import equal, is_zero

ROOT = Path(__file__).parents[3]
CASES = [
    json.loads(line)
    for line in (ROOT / "tests/fixtures/math_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_every_case_gets_its_label():
    wrong = []
    for case in CASES:
        score = verify("math", case["response"], {"answer": case["answer"]}, mode=case.get("mode", "strict"))
        if score.value != float(case["label"]):
            wrong.append((case, score))
    assert not wrong, "\n".join(map(str, wrong))


def test_of_drawn_answers_none_that_is_off_by_one_is_accepted_and_every_equal_one_is():
    drawn = [one for _, one in draw(len(FORMS), seed=11)]
    assert not [one for one in drawn if accepted(one.truth, one.wrong)]
    assert not [one for one in drawn if not accepted(one.truth, one.same)]


BOMBS = (
    r"e^{e^{e^{e^{e}}}}",
    r"9^{9^{9^9}}",
    r"\prod_{k=1}^{10^9}k",
    r"((10^9)!)!",
    r"\binom{1000000007}{500000003}",
    r"\sum_{k=1}^{10^{12}} k^{k}",
    r"\sum_{k=1}^{10^{9}}\frac{1}{k}",
    r"\int_0^1 e^{x^{x}} \sin(x^{x}) dx",
    r"\sin(10^{10^{10}})",
    r"\Gamma(10^{12})",
    r"(x+y+z+w)^{5000}",
    r"7^{10^{9}} \bmod 13",
    r"\frac{1}{9^{9^{9^9}}}",
)


def test_a_response_that_cannot_be_worked_out_is_wrong_and_never_unscored():
    for bomb, gold in zip(BOMBS, itertools.cycle(["12", r"\frac{x}{2}+\sqrt{3}"]), strict=False):
        assert verify("math", rf"\boxed{{{bomb}}}", {"answer": gold}).value == 0.0, bomb


@pytest.mark.parametrize("bomb", [r"e^{e^{e^{e^{e}}}}", r"9^{9^{9^{9}}}", "10^{10^{10}}-1"])
def test_a_ground_truth_too_large_to_be_compared_equals_its_own_text_and_makes_others_unscored(bomb):
    assert verify("math", rf"\boxed{{{bomb}}}", {"answer": bomb}).value == 1.0
    score = verify("math", r"\boxed{12}", {"answer": bomb})
    assert score.value is None
    assert "bad ground truth" in score.reason
    assert "too large" in score.reason


def test_what_no_guard_foresees_ends_by_its_processor_time_and_is_wrong(monkeypatch):
    with pytest.raises(OutOfTime), processor_seconds(0.05):
        any(False for _ in itertools.count())
    monkeypatch.setattr(package, "SECONDS", 0.02)
    nested = r"\int_0^1\int_0^1\int_0^1 e^{x^2y^3z^4}\sin(xyz)dxdydz"
    score = math(Response(rf"\boxed{{{nested}}}"), {"answer": "12"})
    assert score.value == 0.0
    assert "processor time" in score.reason


def test_a_percentage_equals_its_number_and_its_value_and_nothing_else():
    assert [equivalent(r"25\%", text) for text in ("25", "0.25", r"\frac14", "2.5", "0.0025", r"0.25\%")] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_a_constant_is_zero_exactly_if_simplification_says_so():
    root, e = sympy.sqrt, sympy.E
    zeros = [
        root(2) + root(3) - root(5 + 2 * root(6)),
        sympy.cbrt(2 + root(5)) - (1 + root(5)) / 2,
        sympy.log(6) - sympy.log(2) - sympy.log(3),
        sympy.sin(sympy.pi / 12) - (root(6) - root(2)) / 4,
        sympy.sinh(100) - (e**100 - e**-100) / 2,
        sympy.atan(1) * 4 - sympy.pi,
    ]
    for constant in zeros:
        assert is_zero(constant), constant
        for tiny in (sympy.Rational(1, 2**300), e**-500, root(2) / 10**200):
            assert not is_zero(constant + tiny), (constant, tiny)


def test_formulas_that_agree_on_half_of_the_numbers_only_differ():
    x = sympy.Symbol("x", real=True)
    assert not equal(abs(x), x)
    assert not equal(sympy.sqrt((x - 5) ** 2), x - 5)
    assert not equal(abs(x - 1000), 1000 - x)
    assert equal(sympy.sqrt(x**2), abs(x))
    assert equal(x ** sympy.Rational(3, 2), x * sympy.sqrt(x))
