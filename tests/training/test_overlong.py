"""Overlong responses: groups are chosen by raw rewards, then punished exactly once, or masked."""

from __future__ import annotations

import numpy as np
import pytest
from megarl.training.overlong import settle_overlong
from megarl.training.rl import fill

from megarl.records import Group, Prompt, Sample, WeightSpan
from megarl.rewards import RewardSettings, raw_reward
from megarl.rollout.sampling import rollout_counts

PROMPT = Prompt("p/0", np.array([1]), "q", "math", {})
BUDGET = 20
SOFT = RewardSettings(soft_overlong=10)


def response(length: int, reward: float | None, finish_reason: str = "stop") -> Sample:
    return Sample(
        PROMPT, f"p/0#{length}", np.arange(length), np.zeros(length), np.ones(length), finish_reason,
        (WeightSpan(0, 0, length),), reward=reward, reward_parts={"math": reward},
        unscored_reason=None if reward is not None else "math: timed out after 5 s",
    )  # fmt: skip


def group(*samples: Sample) -> Group:
    return Group(PROMPT, samples)


def settled(groups: list[Group], settings: RewardSettings, *, dynamic: bool) -> list[Group]:
    """What a step makes of these groups once they are sampled and scored."""
    kept = fill(lambda count, place: groups, wanted=len(groups), rounds=1, dynamic=dynamic)
    return [settle_overlong(made, settings, BUDGET) for made in kept]


def test_dynamic_sampling_reads_the_raw_rewards_and_only_kept_groups_are_punished():
    alike = group(response(5, 1.0), response(18, 1.0))  # the punishment alone would make them differ
    mixed = group(response(5, 0.0), response(15, 1.0), response(20, 1.0), response(12, None))
    first, second = settled([alike, mixed], SOFT, dynamic=True)
    assert first.dropped == "same_reward"
    assert [s.reward for s in first.samples] == [1.0, 1.0]
    assert second.dropped is None
    assert [s.reward for s in second.samples] == [0.0, 0.5, 0.0, None]
    assert [raw_reward(s) for s in second.samples] == [0.0, 1.0, 1.0, None]
    assert [s.reward_parts["soft_overlong"] for s in second.samples] == pytest.approx([0, -0.5, -1, -0.2])


def test_groups_are_sampled_in_the_place_of_dropped_ones_for_so_many_rounds():
    alike, mixed = group(response(5, 1.0), response(6, 1.0)), group(response(5, 0.0), response(6, 1.0))
    offered, asked = iter([alike, mixed, alike, mixed, alike, alike]), []

    def sample_round(count: int, place: int) -> list[Group]:
        asked.append((count, place))
        return [next(offered) for _ in range(count)]

    kept = fill(sample_round, wanted=3, rounds=3, dynamic=True)
    assert asked == [(3, 0), (2, 3), (1, 5)], "how many more, after how many"
    assert [g.dropped for g in kept] == [
        "same_reward",
        None,
        "same_reward",
        None,
        "same_reward",
        "same_reward",
    ]


def test_the_punishment_is_applied_exactly_once():
    once = settle_overlong(group(response(20, 1.0)), SOFT, BUDGET)
    assert once.samples[0].reward == 0.0
    with pytest.raises(ValueError, match="soft_overlong"):
        settle_overlong(once, SOFT, BUDGET)


def test_overlong_filtering_masks_truncated_responses_and_leaves_rewards():
    cut = group(response(20, 0.0, "length"), response(20, 1.0))
    (made,) = settled([cut], RewardSettings(overlong_filtering=True), dynamic=False)
    assert [s.active_tokens for s in made.samples] == [0, 20]
    assert [s.reward for s in made.samples] == [0.0, 1.0]


def test_nothing_happens_unless_asked_for():
    cut = group(response(20, 0.0, "length"), response(20, 1.0))
    (made,) = settled([cut], RewardSettings(), dynamic=False)
    assert [(s.reward, s.active_tokens, dict(s.reward_parts)) for s in made.samples] == [
        (0.0, 20, {"math": 0.0}),
        (1.0, 20, {"math": 1.0}),
    ]


def test_counts_read_raw_rewards_every_part_and_the_reason_of_what_is_unscored():
    made = settle_overlong(group(response(20, 1.0), response(5, 0.0), response(6, None)), SOFT, BUDGET)
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
