"""Several scores become one reward."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.rewards import Part, Response, Score, Scorer
from megarl.rewards.scoring.compose import PartScore, compose, reason_kind

FORMAT = {"name": "format", "weight": 0.5}
GOOD = "<think>t</think><answer>Paris</answer>"


def reward_of(text: str, ground_truth: dict | None = None, **settings):
    with Scorer({"workers": 0, **settings}) as scorer:
        return asyncio.run(
            scorer.score_response("exact", Response(text), ground_truth or {"answer": "Paris"})
        )


def part_score(name: str, value: float | None, **part) -> PartScore:
    reason = None if value is not None else "timed out"
    return PartScore(Part(name=name, **part), Score(value, reason=reason))


def test_the_reward_is_the_weighted_sum_and_every_part_is_logged_raw():
    scored = reward_of(GOOD, verifiers=[{"name": "exact", "weight": 2.0}], shaping=[FORMAT])
    assert scored.reward == 2.5
    assert scored.parts["exact"] == 1.0
    assert scored.parts["format"] == 1.0
    assert scored.parts["format/once"] == 1.0
    assert reward_of("<answer>Paris</answer>", shaping=[FORMAT]).reward == 1.0


def test_a_shut_gate_gives_its_value_and_runs_nothing_else():
    gate = {"name": "format", "weight": 0.0, "gate": 1.0}
    scored = reward_of("Paris", shaping=[gate], gate_value=-1.0)
    assert scored.reward == -1.0
    assert "exact" not in scored.parts
    assert reward_of(GOOD, shaping=[gate], gate_value=-1.0).reward == 1.0


def test_parts_and_the_sum_are_clipped():
    length = {"name": "length", "weight": 2.0, "options": {"start": 1, "end": 5, "unit": "characters"}}
    assert reward_of("Paris", shaping=[length]).reward == -1.0
    assert reward_of("Paris", shaping=[{**length, "clip": (-0.25, 0.0)}]).reward == 0.5
    assert reward_of("Paris", shaping=[length], clip=(0.0, 1.0)).reward == 0.0


def test_one_verifier_may_score_twice_under_two_names():
    short = {"name": "short", "options": {"start": 1, "end": 9, "unit": "characters"}}
    few = {"name": "few", "options": {"start": 1, "end": 2, "unit": "words"}, "weight": 0}
    shaping = [{**part, "verifier": "length"} for part in (short, few)]
    assert reward_of("Paris", shaping=shaping).parts.keys() == {"exact", "short", "few"}
    with pytest.raises(UserError, match="two parts are named 'length'"):
        Scorer({"shaping": [{"name": "length", "options": {"start": 1, "end": 2}}] * 2})


values = st.one_of(st.none(), st.floats(-10, 10))


@given(st.lists(st.tuples(values, st.floats(-2, 2)), min_size=1, max_size=5))
def test_a_part_that_counts_and_has_no_score_leaves_the_response_unscored(parts):
    results = [part_score(f"p{i}", value, weight=weight) for i, (value, weight) in enumerate(parts)]
    scored = compose(results, gate_value=0.0, clip=None)
    missing = [i for i, (value, weight) in enumerate(parts) if value is None and weight != 0]
    if missing:
        assert (scored.reward, scored.reason) == (None, f"p{missing[0]}: timed out")
    else:
        assert scored.reward == pytest.approx(sum(v * w for v, w in parts if v is not None))
    assert scored.parts == {f"p{i}": value for i, (value, _) in enumerate(parts)}


def test_a_gate_that_cannot_be_judged_is_unscored_not_shut():
    scored = compose([part_score("g", None, gate=1.0)], gate_value=0.0, clip=None)
    assert (scored.reward, scored.reason) == (None, "g: timed out")


@pytest.mark.parametrize(
    "settings",
    [
        {"gate_value": float("nan")},
        {"clip": (float("nan"), 1.0)},
        {"shaping": [{"name": "format", "weight": float("inf")}]},
        {"shaping": [{"name": "format", "gate": float("nan")}]},
    ],
)
def test_a_setting_that_would_make_rewards_no_numbers_is_refused(settings):
    with pytest.raises(UserError, match="finite"):
        Scorer({"workers": 0, **settings})


def test_a_shaping_part_named_like_a_prompts_verifier_is_refused_before_anything_is_sampled():
    scorer = Scorer({"workers": 0, "shaping": [{"name": "exact", "weight": 0.5}]})
    with scorer, pytest.raises(UserError, match=r"shaping has a part named 'exact'.*`verifier: exact`"):
        scorer.check(["exact"])
    with Scorer({"workers": 0, "shaping": [{"name": "again", "verifier": "exact"}]}) as scorer:
        scorer.check(["exact"])


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("math: timed out after 5 s", "timed_out"),
        ("math: bad ground truth: 'answer' is empty: ''", "bad_ground_truth"),
        ("code: the scoring worker died (signal SIGKILL)", "worker_died"),
        ("code: sandbox: bubblewrap (as root) did not start: exit code 1", "sandbox"),
        ("mine:score: raised KeyError: 'answer'", "raised"),
        ("mine:score: returned nan", "no_number"),
        ("remote: the service could not score it", "service"),
        ("judge: no score in the judge's reply: 'hm'", "service"),
        ("", "other"),
    ],
)
def test_reasons_are_counted_by_kind(reason, kind):
    assert reason_kind(reason) == kind
