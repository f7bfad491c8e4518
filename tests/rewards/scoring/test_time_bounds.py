"""A pathological answer costs at most its time bound, and only itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from megarl.rewards import Response, Scored, Scorer

BOUND_S = 1.5
SLACK_S = 60.0  # a bound on waiting, for a busy machine: without one, none of these would end

PATHOLOGICAL = {
    "a tower of powers": r"10^{10^{10}}",
    "a tower in program notation": "10**10**10",
    "a factorial of a factorial": "((9!)!)!",
    "a huge binomial": r"\binom{10^{9}}{5 \cdot 10^{8}}",
    "a huge binomial of digits": r"\binom{1000000007}{500000003}",
    "a long sum": r"\sum_{k=1}^{10^{12}} k^{k}",
    "an integral without a closed form": r"\int_0^1 e^{x^{x}} \sin(x^{x}) dx",
    "a high power of a sum": r"(x+y+z+w)^{3000}",
    "nested powers of a variable": "x^{" * 30 + "x" + "}" * 30,
    "deep nesting": "(" * 38 + "x" + "+1)" * 38,
    "nested roots": r"\sqrt{1+" * 60 + "1" + "}" * 60,
    "many terms": "+".join(f"x_{{{i}}}^{{{i}}}" for i in range(100)),
    "nested absolute values": "|" * 400 + "x" + "|" * 400,
    "a product of sums": "".join(f"(x+{i})" for i in range(60)),
    "trigonometry": r"\sin(\cos(\tan(" * 12 + "x" + ")))" * 12,
    "a long digit string": "9" * 1999,
    "sums of fractions": "+".join(rf"\frac{{x}}{{y+{i}}}" for i in range(40)),
}


@pytest.mark.slow
def test_each_pathological_answer_costs_at_most_its_bound_and_the_pool_goes_on():
    part = {"name": "math", "timeout_s": BOUND_S}

    async def score(scorer: Scorer, answer: str, gold: str) -> tuple[Scored, float]:
        start = time.monotonic()
        scored = await scorer.score_response("math", Response(rf"\boxed{{{answer}}}"), {"answer": gold})
        return scored, time.monotonic() - start

    async def go() -> dict[str, tuple[Scored, float]]:
        with Scorer({"workers": 1, "verifiers": [part]}) as scorer:
            await score(scorer, "5", "5")  # the worker is up
            results = {}
            for name, answer in PATHOLOGICAL.items():
                results[name] = await score(scorer, answer, r"\frac{x}{2}+\sqrt{3}")
                scored, _ = await score(scorer, "5", "5")
                assert scored.reward == 1.0, f"after {name} the pool no longer scores"
            return results

    for name, (scored, seconds) in asyncio.run(go()).items():
        assert seconds < BOUND_S + SLACK_S, name
        assert scored.reward != 1.0, name
        assert scored.reward == 0.0 or "timed out" in scored.reason, (name, scored)
