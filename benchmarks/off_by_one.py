"""Whether `math` can be fooled by an answer that is nearly right.

    python benchmarks/off_by_one.py                 # 400 drawn answers
    python benchmarks/off_by_one.py --answers 2000 --seed 7

Answers of many forms are drawn from a seed. Each is asked twice: with one number in it changed by one, which is wrong,
and in another equal form, which is right. The exit code is 1 if a wrong one is accepted or a right one rejected.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megarl.rewards import Response
from megarl.rewards.verifiers.math import math


@dataclass(frozen=True)
class Drawn:
    """An answer: `truth`, another text of the same, and a text that differs by one in one place."""

    truth: str
    same: str
    wrong: str


def _one_off(rng: random.Random, text: str) -> str:
    """Change one of the integers of a text by one."""
    chosen = rng.choice(list(re.finditer(r"\d+", text)))
    value = int(chosen[0]) + (rng.choice([-1, 1]) if int(chosen[0]) > 1 else 1)
    return text[: chosen.start()] + str(value) + text[chosen.end() :]


def tiny_complement(rng: random.Random) -> Drawn:
    n = rng.randint(30, 3000)
    return Drawn(
        rf"1-\frac{{1}}{{2^{{{n}}}}}", rf"1-2^{{-{n}}}", rf"1-\frac{{1}}{{2^{{{n + rng.choice([-1, 1])}}}}}"
    )


def tiny_numerator(rng: random.Random) -> Drawn:
    a, n = rng.randint(100, 9999), rng.randint(60, 500)
    return Drawn(
        f"1-{a}/2^{{{n}}}", rf"\frac{{2^{{{n}}}-{a}}}{{2^{{{n}}}}}", f"1-{a + rng.choice([-1, 1])}/2^{{{n}}}"
    )


def fraction_power(rng: random.Random) -> Drawn:
    a, n = rng.randint(2, 9), rng.randint(50, 2000)
    off = n + rng.choice([-1, 1])
    base = rf"\left(\frac{{{a}}}{{{a + 1}}}\right)"
    return Drawn(f"1-{base}^{{{n}}}", rf"1-\frac{{{a}^{{{n}}}}}{{{a + 1}^{{{n}}}}}", f"1-{base}^{{{off}}}")


def small_power(rng: random.Random) -> Drawn:
    a, n = rng.choice([2, 3, 5, 7, 10]), rng.randint(20, 2000)
    return Drawn(f"{a}^{{-{n}}}", rf"\frac{{1}}{{{a}^{{{n}}}}}", f"{a}^{{-{n + rng.choice([-1, 1])}}}")


def large_power(rng: random.Random) -> Drawn:
    a, n = rng.choice([2, 3, 5, 7]), rng.randint(50, 2000)
    return Drawn(
        f"{a}^{{{n}}}-1", rf"{a} \cdot {a}^{{{n - 1}}}-1", rng.choice([f"{a}^{{{n}}}", f"{a}^{{{n - 1}}}-1"])
    )


def exponential(rng: random.Random) -> Drawn:
    n = rng.randint(20, 2000)
    return Drawn(f"1-e^{{-{n}}}", rf"1-\frac{{1}}{{e^{{{n}}}}}", f"1-e^{{-{n + rng.choice([-1, 1])}}}")


def factorial(rng: random.Random) -> Drawn:
    n = rng.randint(20, 150)
    truth = rng.choice([f"{n}!", rf"\frac{{1}}{{{n}!}}"])
    same = truth.replace(f"{n}!", rf"{n} \cdot {n - 1}!")
    return Drawn(truth, same, rng.choice([truth + "+1", truth.replace(str(n), str(n + 1))]))


def binomial(rng: random.Random) -> Drawn:
    n = rng.randint(40, 300)
    k = rng.randint(5, n // 2 - 2)
    over = rf"/2^{{{n}}}"
    same = rf"\frac{{{n}!}}{{{k}!({n - k})!}}{over}"
    return Drawn(rf"\binom{{{n}}}{{{k}}}{over}", same, rf"\binom{{{n}}}{{{k - 1}}}{over}")


def long_integer(rng: random.Random) -> Drawn:
    n = rng.randint(10**17, 10**60)
    return Drawn(str(n), f"{n:,}", str(n + rng.choice([-1, 1])))


def long_decimal(rng: random.Random) -> Drawn:
    digits = str(rng.randint(10**17, 10**40 - 2)).rstrip("09") + "5"
    return Drawn(f"0.{digits}", f".{digits}0", f"0.{digits[:-1]}{rng.choice('46')}")


def decimal_and_letter(rng: random.Random) -> Drawn:
    digits = str(rng.randint(10**17, 10**25))[:-1] + "5"
    return Drawn(f"x+0.{digits}", f"0.{digits}+x", f"x+0.{digits[:-1]}4")


def scientific(rng: random.Random) -> Drawn:
    a, n = rng.randint(2, 99), rng.randint(9, 300)
    return Drawn(rf"{a} \times 10^{{-{n}}}", f"{a}e-{n}", rf"{a + 1} \times 10^{{-{n}}}")


def float_digits(rng: random.Random) -> Drawn:
    a, b = rng.randint(1, 98), rng.choice([3, 7, 9, 11, 13, 17, 19])
    a += a % b == 0
    shown = repr(a / b)
    wrong = shown[:-4] + str((int(shown[-4]) + rng.choice([1, 9])) % 10) + shown[-3:]
    return Drawn(rf"\frac{{{a}}}{{{b}}}", shown, wrong)


def fraction(rng: random.Random) -> Drawn:
    a, b, k = rng.randint(10**9, 10**20), rng.randint(10**9, 10**20), rng.randint(2, 9)
    return Drawn(
        rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a * k}}}{{{b * k}}}", rng.choice([f"{a + 1}/{b}", f"{a}/{b + 1}"])
    )


def radical(rng: random.Random) -> Drawn:
    a, b = rng.randint(10**6, 10**18), rng.choice([2, 3, 5, 7])
    return Drawn(
        rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"\sqrt{{{a * a * b + rng.choice([-1, 1])}}}"
    )


def sum_of_radicals(rng: random.Random) -> Drawn:
    a, b = rng.sample([2, 3, 5, 7, 11, 13], 2)
    n = rng.randint(20, 200)
    truth = rf"\sqrt{{{a}}}+\sqrt{{{b}}}"
    return Drawn(truth, rf"\sqrt{{{a + b}+2\sqrt{{{a * b}}}}}", rf"{truth}+10^{{-{n}}}")


def logarithm(rng: random.Random) -> Drawn:
    n = rng.randint(12, 100)
    return Drawn(
        rf"\ln(10^{{{n}}}+1)", rf"\ln(1+10^{{{n}}})", rng.choice([rf"\ln(10^{{{n}}}+2)", rf"{n}\ln 10"])
    )


def series(rng: random.Random) -> Drawn:
    n = rng.randint(30, 120)
    return Drawn(
        rf"\sum_{{k=1}}^{{{n}}}\frac{{1}}{{2^k}}", rf"1-2^{{-{n}}}", rng.choice(["1", rf"1-2^{{-{n + 1}}}"])
    )


def polynomial(rng: random.Random) -> Drawn:
    a, b = rng.randint(10**8, 10**12), rng.randint(10**8, 10**12)
    truth = f"x^2+{a + b}x+{a * b}"
    return Drawn(truth, f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b + rng.choice([-1, 1])}")


def small_term(rng: random.Random) -> Drawn:
    n = rng.randint(12, 300)
    return Drawn(rf"x^2+\frac{{y}}{{10^{{{n}}}}}", rf"10^{{-{n}}}y+x^2", rf"x^2+\frac{{y}}{{10^{{{n + 1}}}}}")


def _within(form: str) -> Callable[[random.Random], Drawn]:
    """Put a tiny complement and a whole number into a larger answer."""

    def draw(rng: random.Random) -> Drawn:
        inner, n = tiny_complement(rng), rng.randint(2, 99)
        truth, same = form.replace("N", str(n)), form.replace("N", f"{n}.0")
        wrong = rng.choice([truth.replace("T", inner.wrong), truth.replace("T", inner.truth + "+1")])
        return Drawn(truth.replace("T", inner.truth), same.replace("T", inner.same), wrong)

    return draw


def line(rng: random.Random) -> Drawn:
    a, b, c, k = (rng.randint(2, 10**9) for _ in range(4))
    truth = f"{a}x+{b}y={c}"
    return Drawn(truth, f"{k * a}x+{k * b}y-{k * c}=0", _one_off(rng, truth))


def quadratic(rng: random.Random) -> Drawn:
    b, c = rng.randint(1, 9), rng.randint(30, 99)  # without real solutions
    truth = f"x^2-{b}x+{c}=0"
    return Drawn(truth, f"3x^2+{3 * c}={3 * b}x", rng.choice([f"x^2-{b}x+{c + 1}=0", f"x^2+{c}=0"]))


def identity(rng: random.Random) -> Drawn:
    n = rng.randint(2, 99)
    truth = rf"{n}\sin^2x+{n}\cos^2x={n}"
    return Drawn(truth, rf"{n}\cos^2x+{n}\sin^2x={n}", rf"{n}\sin^2x+{n}\cos^2x={n + 1}")


def probability(rng: random.Random) -> Drawn:
    k, n = rng.randint(1, 9), rng.randint(11, 99)
    return Drawn(
        f"P(X={k})={k}/{n}", f"{k}/{n}", rng.choice([f"P(X={k + 1})={k}/{n}", f"P(X={k})={k}/{n + 1}"])
    )


def name(rng: random.Random) -> Drawn:
    n = rng.randint(10**17, 10**19)
    left = rng.choice(["|AB|", r"\overline{AB}", r"\cos\theta", "f(2)", "S_{ABC}", "a_{10}"])
    return Drawn(str(n), f"{left}={n}", f"{left}={n + rng.choice([-1, 1])}")


def inequality(rng: random.Random) -> Drawn:
    n = rng.randint(10**16, 10**20)
    return Drawn(f"x<{n}", f"-x>-{n}", rng.choice([f"-x>-{n + 1}", f"x<{n - 1}", rf"x \le {n}"]))


def ratio(rng: random.Random) -> Drawn:
    a, b = rng.randint(2, 10**18), rng.randint(2, 99)
    return Drawn(f"{a}:{b}", f"V_1:V_2={a}:{b}", f"V_1:V_2={a + 1}:{b}")


def determinant(rng: random.Random) -> Drawn:
    a, b, c, d = (rng.randint(2, 10**9) for _ in range(4))
    same = rf"\begin{{vmatrix}}{a}&{b}\\{c}&{d}\end{{vmatrix}}"
    return Drawn(str(a * d - b * c), same, str(a * d - b * c + rng.choice([-1, 1])))


def remainder(rng: random.Random) -> Drawn:
    a, m = rng.randint(10**9, 10**15), rng.randint(50, 99)
    return Drawn(str(a % m), rf"{a}\bmod {m}={a % m}", str(a % m + 1))


FORMS: dict[str, Callable[[random.Random], Drawn]] = {
    **{
        form.__name__: form
        for form in (
            *(
                tiny_complement,
                tiny_numerator,
                fraction_power,
                small_power,
                large_power,
                exponential,
                factorial,
            ),
            *(
                binomial,
                long_integer,
                long_decimal,
                decimal_and_letter,
                scientific,
                float_digits,
                fraction,
                radical,
            ),
            *(
                sum_of_radicals,
                logarithm,
                series,
                polynomial,
                small_term,
                line,
                quadratic,
                identity,
                probability,
            ),
            *(name, inequality, ratio, determinant, remainder),
        )
    },
    "tuple": _within("(T, N)"),
    "set": _within(r"\{N, T\}"),
    "interval": _within("[0, T)"),
    "matrix": _within(r"\begin{pmatrix}T & N \\ N & 0\end{pmatrix}"),
    "assignment": _within("x = T"),
    "bound": _within("x > T"),
    "curve": _within("y = Nx + T"),
    "multiple": _within("T, N"),
}


def draw(count: int, seed: int) -> list[tuple[str, Drawn]]:
    """Return `count` answers with the names of their forms, the same for the same seed."""
    rng = random.Random(seed)
    forms = list(FORMS)
    return [(forms[index % len(forms)], FORMS[forms[index % len(forms)]](rng)) for index in range(count)]


def accepted(truth: str, answer: str) -> bool:
    return math(Response(rf"So it is $\boxed{{{answer}}}$."), {"answer": truth}).value == 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asked, wrong, right = Counter[str](), Counter[str](), Counter[str]()
    for form, drawn in draw(given.answers, given.seed):
        asked[form] += 1
        for text, counter in ((drawn.wrong, wrong), (drawn.same, right)):
            if accepted(drawn.truth, text):
                counter[form] += 1
            elif counter is right:
                print(f"rejected though equal: {drawn.truth} and {text}")
        if wrong[form] and accepted(drawn.truth, drawn.wrong):
            print(f"accepted though off by one: {drawn.truth} and {drawn.wrong}")
    print(f"{'form':20} {'asked':>6} {'off by one':>11} {'equal':>6}")
    for form in asked:
        print(f"{form:20} {asked[form]:6} {wrong[form]:11} {right[form]:6}")
    print(
        f"accepted: {wrong.total()} of {asked.total()} off by one, {right.total()} of {asked.total()} equal ones"
    )
    return int(wrong.total() > 0 or right.total() < asked.total())


if __name__ == "__main__":
    sys.exit(main())
