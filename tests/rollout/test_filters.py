"""What becomes of sampled groups: chosen by raw rewards, overlong ones punished exactly once or masked, stale ones
stopped, dropped or counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megarl.records import Group, Prompt, Sample, WeightSpan
from megarl.rewards import RewardSettings
from megarl.rollout.filters import (
    WrongWeights,
    add_once,
    apply_overlong_penalty,
    filter_stale,
    is_right,
    mask_overlong,
    raw_reward,
    sample_until_enough,
    soft_overlong_penalty,
)
from megarl.rollout.sampling import merge_counts

PROMPT = Prompt("p/0", np.array([1]), "q", "math", {})
BUDGET = 20
SOFT = RewardSettings(soft_overlong=10)


# --- dynamic sampling and overlong responses ---


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
    kept = sample_until_enough(lambda missing: groups, wanted=len(groups), rounds=1, dynamic=dynamic)
    return [apply_overlong_penalty(made, settings, BUDGET) for made in kept]


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


def shaped(verdict: float | None, reward: float | None, length: int = 5) -> Sample:
    """A response with the verifier's score and a reward that shaping made of it."""
    return replace(response(length, reward), reward_parts={"math": verdict, "length": -0.1})


@pytest.mark.parametrize(
    ("samples", "dropped"),
    [
        ([shaped(1.0, 0.5), shaped(1.0, 0.9)], "same_verdict"),  # all right, told apart by their length
        ([shaped(0.0, 0.1), shaped(0.0, 0.5)], "same_verdict"),  # all wrong, some in the right format
        ([shaped(1.0, 0.9), shaped(0.0, 0.1)], None),
        ([shaped(0.25, 0.2), shaped(0.5, 0.4)], None),  # part credit is something to learn from
        ([shaped(1.0, 0.5), shaped(0.0, 0.5)], "same_reward"),  # advantages of zero
        (
            [shaped(1.0, 0.5), shaped(1.0, 0.9), shaped(0.0, None)],
            "same_verdict",
        ),  # the unscored one is masked
        ([shaped(None, 0.5), shaped(None, 0.9)], None),  # a verifier of weight 0 that could not score
        ([shaped(None, None), shaped(None, None)], "same_reward"),
    ],
)
def test_dynamic_sampling_drops_groups_in_which_the_verifier_says_the_same_of_all(
    samples: list[Sample], dropped: str | None
) -> None:
    (made,) = settled([group(*samples)], RewardSettings(), dynamic=True)
    assert made.dropped == dropped


@pytest.mark.parametrize(
    ("sample", "right"),
    [
        (shaped(1.0, 0.5), True),  # 1 - 0.5 for its length
        (shaped(1.0, 0.9), True),  # 0.9 of the verifier, and 0.1 for a format that it lacks
        (shaped(0.0, 1.0), False),  # a bonus for its format
        (shaped(0.75, 1.25), False),  # three of four tests, and a bonus
        (shaped(2.0, 1.0), True),
        (shaped(None, None), None),
        (shaped(1.0, None), True),  # only a shaping part could not be scored
        (
            replace(shaped(None, 0.0), reward_parts={"format": 0.0}),
            False,
        ),  # a shut gate: the verifier did not run
        (add_once(shaped(1.0, 1.0), "soft_overlong", -1.0), True),
    ],
)
def test_right_is_what_the_prompts_verifier_gives_full_marks(sample: Sample, right: bool | None) -> None:
    assert is_right(sample) is right


def test_groups_are_sampled_in_the_place_of_dropped_ones_for_so_many_rounds():
    alike, mixed = group(response(5, 1.0), response(6, 1.0)), group(response(5, 0.0), response(6, 1.0))
    offered, asked = iter([alike, mixed, alike, mixed, alike, alike]), []

    def sample_round(missing: Sequence[int]) -> list[Group]:
        asked.append(missing)
        return [next(offered) for _ in range(missing[0])]

    kept = sample_until_enough(sample_round, wanted=3, rounds=3, dynamic=True)
    assert asked == [[3], [2], [1]], "how many more"
    assert [g.dropped for g in kept] == [
        "same_reward",
        None,
        "same_reward",
        None,
        "same_reward",
        "same_reward",
    ]


def test_a_replica_that_lacks_nothing_takes_part_in_the_rounds_of_the_others():
    """It is asked for no group, and hears what they draw."""
    mixed, asked = group(response(5, 0.0), response(6, 1.0)), []
    others = iter([3, 2, 0])

    def sample_round(missing: Sequence[int]) -> list[Group]:
        asked.append(missing)
        return [mixed] * missing[0]

    def gather(missing: int) -> list[int]:
        return [missing, next(others)]

    kept = sample_until_enough(sample_round, wanted=3, rounds=8, dynamic=True, gather=gather)
    assert asked == [[3, 3], [0, 2]]
    assert len(kept) == 3


def test_the_punishment_is_applied_exactly_once():
    once = apply_overlong_penalty(group(response(20, 1.0)), SOFT, BUDGET)
    assert once.samples[0].reward == 0.0
    with pytest.raises(ValueError, match="soft_overlong"):
        apply_overlong_penalty(once, SOFT, BUDGET)


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


def test_soft_overlong_penalty_of_daposs_budget() -> None:
    lengths = np.array([0, 16384, 17408, 18432, 20480, 20481, 40000])
    expected = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    assert soft_overlong_penalty(lengths, 20480, 4096) == pytest.approx(expected)


@pytest.mark.parametrize(("length", "amount"), [(10, 0.0), (11, -0.1), (19, -0.9), (20, -1.0)])
def test_the_punishment_begins_one_token_above_its_bound_and_is_whole_at_the_budget(
    length: int, amount: float
) -> None:
    """Ten tokens of twenty are free."""
    (made,) = apply_overlong_penalty(group(response(length, 1.0)), SOFT, BUDGET).samples
    assert made.reward_parts["soft_overlong"] == pytest.approx(amount)
    assert made.reward == pytest.approx(1.0 + amount)


def test_an_amount_is_added_exactly_once_and_the_raw_reward_is_kept():
    sample = response(5, 1.0)
    shaped = add_once(sample, "soft_overlong", -0.25)
    assert shaped.reward == 0.75
    assert raw_reward(shaped) == 1.0
    assert raw_reward(sample) == 1.0
    assert shaped.reward_parts == {"math": 1.0, "raw": 1.0, "soft_overlong": -0.25}
    with pytest.raises(ValueError, match="'soft_overlong' was added to its reward before"):
        add_once(shaped, "soft_overlong", -0.25)
    twice = add_once(shaped, "bonus", 1.0)
    assert (twice.reward, raw_reward(twice)) == (1.75, 1.0)


def test_an_unscored_sample_stays_unscored():
    shaped = add_once(response(5, None), "soft_overlong", -1.0)
    assert shaped.reward is None
    assert raw_reward(shaped) is None


def test_overlong_filtering_masks_truncated_responses_and_keeps_their_reward():
    whole, cut = response(5, 1.0), response(5, 1.0, "length")
    assert mask_overlong(whole) is whole
    masked = mask_overlong(cut)
    assert masked.active_tokens == 0
    assert masked.reward == 1.0
    assert np.array_equal(cut.loss_mask, np.ones(5, dtype=bool)), "the sample given is not changed"


# --- staleness ---


def sampled_by(name: str, *versions: int) -> Sample:
    """Two tokens of each version."""
    spans = tuple(WeightSpan(version, 2 * n, 2 * n + 2) for n, version in enumerate(versions))
    ids = np.zeros(2 * len(versions), np.int32)
    return Sample(PROMPT, name, ids, ids, ids == 0, "stop", spans)


def test_other_weights_than_those_of_the_last_sync_are_named() -> None:
    filter_stale([group(sampled_by("p/0#1", 4))], version=4, most=0, then="stop")
    with pytest.raises(WrongWeights, match=r"'p/0#1'.*tokens 2 to 4 .* version 3.*given version 4"):
        filter_stale([group(sampled_by("p/0#1", 4, 3))], version=4, most=0, then="stop")


@pytest.mark.parametrize("then", ["stop", "drop", "correct"])
def test_weights_that_do_not_exist_yet_are_never_believed(then) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WrongWeights, match="version 5"):
        filter_stale([group(sampled_by("p/0#1", 4, 5))], version=4, most=9, then=then)


def test_stale_responses_leave_their_group_and_are_counted() -> None:
    given = [group(sampled_by("fresh", 4), sampled_by("edge", 2, 4), sampled_by("old", 1, 4))]
    kept, staleness = filter_stale(given, version=4, most=2, then="drop")
    assert [s.sample_id for s in kept[0].samples] == ["fresh", "edge"]
    assert merge_counts([staleness] * 2, "rollout") == {
        "rollout/stale_responses": 2.0,
        "rollout/staleness_mean": pytest.approx((0 + 2 + 3) / 3),
    }


def test_with_a_correction_stale_responses_stay_and_are_counted() -> None:
    given = [group(sampled_by("fresh", 4), sampled_by("old", 1))]
    kept, staleness = filter_stale(given, version=4, most=0, then="correct")
    assert [s.sample_id for s in kept[0].samples] == ["fresh", "old"]
    assert staleness["stale_responses"] == (1.0, 1.0)
