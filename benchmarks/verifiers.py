"""How many answers a second the verifiers score, through the same `Scorer` that training uses.

    python benchmarks/verifiers.py                     # 10,000 math answers, 2 workers
    python benchmarks/verifiers.py --answers 2000 --workers 4 --json

The answers are made from a seed: prompts of several kinds in the proportions of a competition-mathematics
data set, a group of responses to each, half of them right in one of many spellings and half of them wrong.
Every verdict is known and checked, so a figure from a verifier that judges wrongly is never shown. No two
prompts are alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from megarl.rewards import Response, Scorer

GROUP = 8
REASONING = "Let us see. We compute the terms one by one and add them up, then check the sum again. " * 40


@dataclass(frozen=True)
class Case:
    kind: str
    gold: str
    answer: str
    right: bool


def integer(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(1000, 10**7)
    return str(n), [str(n), f"{n:,}", f"x = {n}", rf"{n}\text{{ cm}}"], [str(n + k) for k in (1, -1, 10, 7)]


def fraction(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b, k = rng.randint(1, 999), rng.randint(2, 999), rng.randint(2, 9)
    gold = rf"\frac{{{a}}}{{{b}}}"
    right = [f"{a}/{b}", rf"\dfrac{{{a}}}{{{b}}}", rf"\frac{{{a * k}}}{{{b * k}}}", gold]
    return gold, right, [f"{a + 1}/{b}", f"{a}/{b + 1}", f"{-a}/{b}", rf"\frac{{{a}}}{{{b * (k + 1)}}}"]


def root(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.randint(2, 99), rng.choice([2, 3, 5, 7, 11, 13])
    gold = rf"{a}\sqrt{{{b}}}"
    right = [rf"{a} \sqrt{b}" if b < 10 else gold, rf"\sqrt{{{a * a * b}}}", f"{a}*sqrt({b})", gold]
    return gold, right, [rf"{a + 1}\sqrt{{{b}}}", rf"{a}\sqrt{{{b + 17}}}", rf"-{gold}", f"{a * b}"]


def polynomial(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    gold = f"x^2+{a + b}x+{a * b}"
    right = [f"(x+{a})(x+{b})", f"{a * b} + {a + b}x + x^2", f"x^{{2}} + {a + b} x + {a * b}", gold]
    return gold, right, [f"x^2+{a + b}x+{a * b + 1}", f"(x-{a})(x+{b + 200})", f"x^2-{a + b}x", f"{a}x+{b}"]


def function(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    gold = rf"\ln({a * b})"
    right = [rf"\ln {a} + \ln {b}", rf"\ln({a}) + \ln({b})", rf"\log_{{e}}({a * b})", gold]
    return gold, right, [rf"\ln({a * b + 1})", rf"\ln({a}) - \ln({b})", rf"\sin({a})", rf"{a}\ln({b})"]


def interval(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.randint(-99, 0), rng.randint(1, 99)
    gold = rf"[{a}, {b})"
    right = [f"[{a},{b})", rf"\left[{a}, {b}\right)", rf"x \in [{a}, {b})", f"[{a}.0, {b})"]
    return gold, right, [f"({a}, {b})", f"[{a}, {b}]", f"[{a}, {b + 1})", f"{a}, {b}"]


def point(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.randint(1, 999), rng.randint(1000, 9999)
    gold = f"({a}, {b})"
    right = [f"({a},{b})", rf"\left({a},\,{b}\right)", f"(x,y)=({a},{b})", gold]
    return gold, right, [f"({b}, {a})", f"({a}, {b + 1})", f"[{a}, {b}]", f"({a}, {b}, 0)"]


def several(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b, c = rng.sample(range(1, 9999), 3)
    gold = f"{a}; {b}; {c}"
    right = [f"{c}, {a}, {b}", rf"\{{{b}, {c}, {a}\}}", f"{a} and {c} and {b}", gold]
    return gold, right, [f"{a}, {b}", f"{a}, {b}, {c + 1}", f"({b}, {a}, {c})", f"{a}"]


def word(rng: random.Random) -> tuple[str, list[str], list[str]]:
    name = "".join(rng.choice("bcdfgklmnprst") + rng.choice("aeiou") for _ in range(3)).capitalize()
    return name, [name, name.lower(), rf"\text{{{name}}}", f"{name}."], [name[:-1], "none", name + "s", "0"]


KINDS: dict[Callable[[random.Random], tuple[str, list[str], list[str]]], int] = {
    integer: 50,
    fraction: 14,
    root: 9,
    polynomial: 9,
    function: 2,  # left for computer algebra
    interval: 4,
    point: 4,
    several: 4,
    word: 4,
}


def make_cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        gold, right, wrong = kind(rng)
        answers = [(a, True) for a in right] + [(a, False) for a in wrong]
        cases += [Case(kind.__name__, gold, answer, verdict) for answer, verdict in answers[:GROUP]]
    rng.shuffle(cases)
    return cases[:count]


async def score(scorer: Scorer, cases: list[Case]) -> list[float | None]:
    async def one(case: Case) -> float | None:
        response = Response(
            f"<think>{REASONING}</think>{REASONING} So the answer is $\\boxed{{{case.answer}}}$."
        )
        return (await scorer.score_response("math", response, {"answer": case.gold})).reward

    return list(await asyncio.gather(*map(one, cases)))


def processor_seconds(scorer: Scorer) -> float:
    """What this process and its workers have used, in user and system mode."""
    processes = [psutil.Process(), *map(psutil.Process, scorer.worker_pids)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args()
    cases = make_cases(given.answers, given.seed)
    with Scorer({"workers": given.workers}) as scorer:
        asyncio.run(score(scorer, cases[: 4 * GROUP]))  # the workers are up
        start, spent = time.perf_counter(), processor_seconds(scorer)
        rewards = asyncio.run(score(scorer, cases))
        seconds, processor = time.perf_counter() - start, processor_seconds(scorer) - spent
    wrong = [case for case, reward in zip(cases, rewards, strict=True) if reward != float(case.right)]
    if wrong:
        print(f"{len(wrong)} wrong verdicts, first: {wrong[:3]}", file=sys.stderr)
        return 1
    rate = len(cases) / seconds
    kinds = Counter(case.kind for case in cases)
    if given.json:
        print(
            json.dumps(
                {
                    "answers": len(cases),
                    "workers": given.workers,
                    "seconds": seconds,
                    "per_s": rate,
                    "processor_seconds": processor,
                    "per_s_of_two_free_cores": 2 * len(cases) / processor,
                }
            )
        )
    else:
        print(f"{len(cases)} math answers by {given.workers} workers in {seconds:.1f} s: {rate:.0f} a second")
        print(
            f"{processor:.1f} processor seconds, {1000 * processor / len(cases):.2f} ms an answer: "
            f"two cores that are free would do {2 * len(cases) / processor:.0f} a second"
        )
        print("all verdicts right; " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
