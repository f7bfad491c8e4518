"""A round of rollouts: every draw has a seed of its own, responses are scored as they come, groups keep their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.records import Group, Prompt
from megarl.rewards import Scorer
from megarl.rollout.engine import EngineError, GenerateRequest, SamplingParams
from megarl.rollout.filters import apply_overlong_penalty
from megarl.rollout.sampling import rollout_counts, sample_groups
from megarl.seeds import draw_seed
from tests.rollout.scripted import ByLength, ScriptedEngine, scripted
from tests.rollout.test_filters import BUDGET, SOFT, group, response

PROMPTS = [Prompt(f"p/{n}", np.arange(3 + n), "", "exact", {}) for n in (4, 0, 2)]


def sampled(engine: ScriptedEngine, prompts: list[Prompt] = PROMPTS, **changes: Any) -> list[Group]:
    options: dict[str, Any] = {
        "group_size": 3,
        "sampling": SamplingParams(max_new_tokens=8, temperature=0.7, stop_token_ids=(7,)),
        "decode": lambda ids: " ".join(map(str, ids)),
        "seed": 5,
        "step": 9,
        **changes,
    }
    return sample_groups(engine, ByLength(), prompts, **options)


def ids_of(groups: list[Group]) -> list[list[int]]:
    return [s.response_ids.tolist() for g in groups for s in g.samples]


def test_every_response_is_drawn_by_a_seed_that_names_it_and_groups_keep_the_prompts_order() -> None:
    asked: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[int]:
        asked.append(request)
        return [10 + len(request.token_ids), request.sampling.seed % 50]  # type: ignore[operator]

    groups = sampled(scripted(script=script))
    assert [g.prompt.prompt_id for g in groups] == ["p/4", "p/0", "p/2"]
    assert [s.sample_id for s in groups[1].samples] == ["p/0#9.1.0", "p/0#9.1.1", "p/0#9.1.2"]
    expected = [
        [10 + len(p.token_ids), draw_seed(5, 9, p.prompt_id, n, k) % 50]
        for n, p in enumerate(PROMPTS)
        for k in range(3)
    ]
    assert ids_of(groups) == expected
    assert groups[2].samples[0].text == " ".join(map(str, expected[6]))
    assert {s.reward for g in groups for s in g.samples} == {2.0}
    assert len({request.sampling.seed for request in asked}) == 9


def test_the_seed_of_a_draw_does_not_change() -> None:
    """Runs are resumed, and compared, across versions."""
    assert draw_seed(5, 9, "p/4", 0, 0) == 3400430958887142112


def test_equal_seeds_draw_alike_and_a_prompt_that_comes_again_in_a_step_is_drawn_anew() -> None:
    engine = scripted()
    first, again, later = sampled(engine), sampled(engine), sampled(engine, draw_offset=3)
    assert ids_of(first) == ids_of(again)
    assert ids_of(first) != ids_of(later)
    names = [{s.sample_id for g in groups for s in g.samples} for groups in (first, later)]
    assert not names[0] & names[1]


def test_a_greedy_response_gives_its_reward_alone() -> None:
    engine = scripted()
    without, with_one = sampled(engine), sampled(engine, greedy=True)
    assert ids_of(without) == ids_of(with_one)
    (alone,) = sampled(
        engine, PROMPTS[:1], group_size=1, sampling=SamplingParams(8, 0.0, stop_token_ids=(7,))
    )
    assert with_one[0].greedy_reward == alone.samples[0].reward
    assert without[0].greedy_reward is None


def test_routes_and_weight_versions_arrive_with_the_response() -> None:
    engine = scripted()
    engine.update_weights({}.items(), 4)
    for s in (s for g in sampled(engine, return_routes=True) for s in g.samples):
        assert s.routes is not None
        assert s.routes.experts.shape == (s.tokens - 1, 2, 2)
        assert s.routes.experts.dtype == np.uint16
        assert [span.version for span in s.spans] == [4]
    assert all(s.routes is None for g in sampled(engine) for s in g.samples)


def test_scoring_waits_neither_for_the_rounds_end_nor_for_other_scores() -> None:
    """Each of the responses ends at another length; progress is told for each."""
    lengths = iter(range(1, 10))
    engine, scorer, told = scripted(script=lambda request: [1] * next(lengths)), ByLength(), []
    options: dict[str, Any] = {"group_size": 3, "sampling": SamplingParams(20), "decode": str}
    sample_groups(
        engine, scorer, PROMPTS, seed=0, step=0, on_response=lambda: told.append(scorer.under_way), **options
    )
    assert len(told) == 9
    assert scorer.most > 1
    assert any(told), "the first were being scored while others were sampled"


def test_a_prompt_that_no_retry_can_mend_and_an_engine_that_breaks_off_end_the_round() -> None:
    with pytest.raises(UserError, match=r"'long#9\.1\.0'.*context of 64 tokens"):
        sampled(scripted(), [PROMPTS[0], Prompt("long", np.zeros(60), "", "exact", {})])
    with pytest.raises(EngineError, match="breaks off"):
        sampled(scripted("engine_error"))


def test_counts_read_raw_rewards_every_part_and_the_reason_of_what_is_unscored():
    made = apply_overlong_penalty(group(response(20, 1.0), response(5, 0.0), response(6, None)), SOFT, BUDGET)
    counts = rollout_counts([made])
    assert counts["accuracy"] == (1.0, 2.0), "a punished right answer is still right"
    assert counts["reward_mean"] == (0.0, 2.0)
    assert counts["reward_part/math"] == (1.0, 2.0)
    assert counts["reward_part/soft_overlong"] == (-1.0, 3.0)
    assert counts["unscored"] == (1.0, 1.0)
    assert counts["unscored_reason/timed_out"] == (1.0, 1.0)


def test_a_group_that_nobody_could_score_is_neither_all_wrong_nor_all_correct():
    groups = [
        group(response(5, None), response(6, None)),
        group(response(5, 1.0), response(6, None)),
        group(response(5, 0.0), response(6, None)),
    ]
    counts = rollout_counts(groups)
    assert counts["groups_all_correct"] == (1.0, 1.0)
    assert counts["groups_all_wrong"] == (1.0, 1.0)


SHAPED = {
    "length": {"name": "length", "weight": 0.5, "options": {"start": 0, "end": 1}},
    "format": {"name": "regex", "weight": 0.1, "options": {"pattern": "<answer>"}},
    "bonus": {"name": "regex", "weight": 1.0, "options": {"pattern": "[0-9]"}},
}


@pytest.mark.parametrize("shaping", SHAPED)
def test_the_verifier_of_each_prompt_decides_what_is_right_whatever_shaping_adds(shaping: str) -> None:
    """Each half of the responses answers its prompt right; the prompts have two verifiers of unequal weight."""
    settings = {
        "workers": 0,
        "verifiers": [{"name": "exact", "weight": 0.9}, {"name": "multiple_choice", "weight": 0.5}],
        "shaping": [SHAPED[shaping]],
    }
    truths = [("exact", {"answer": "4"}), ("multiple_choice", {"answer": "B", "choices": ["3", "4"]})]
    prompts = [Prompt(f"p/{n}", np.ones(1), "", name, truth) for n, (name, truth) in enumerate(truths)]
    answers = iter(["4", "5", "4", "5", "B", "A", "B", "A"])
    with Scorer(settings) as scorer:
        groups = sample_groups(
            scripted(script=lambda request: [1]),
            scorer,
            prompts,
            group_size=4,
            sampling=SamplingParams(4),
            decode=lambda ids: next(answers),
            seed=0,
            step=0,
        )
    counts = rollout_counts(groups)
    assert counts["accuracy"] == (4.0, 8.0)
    assert counts["groups_all_correct"] == counts["groups_all_wrong"] == (0.0, 1.0)
