"""The weights that sampled a token are those that the trainer believes in, or what was asked for happens."""

from __future__ import annotations

import numpy as np
import pytest
from megarl.rollout.staleness import WrongWeights, settle_staleness

from megarl.records import Group, Prompt, Sample, WeightSpan
from megarl.rollout.sampling import merge_counts

PROMPT = Prompt("p/0", np.arange(3), "", "exact", {})


def sample(name: str, *versions: int) -> Sample:
    """Two tokens of each version."""
    spans = tuple(WeightSpan(version, 2 * n, 2 * n + 2) for n, version in enumerate(versions))
    ids = np.zeros(2 * len(versions), np.int32)
    return Sample(PROMPT, name, ids, ids, ids == 0, "stop", spans)


def groups(*samples: Sample) -> list[Group]:
    return [Group(PROMPT, samples)]


def test_other_weights_than_those_of_the_last_sync_are_named() -> None:
    settle_staleness(groups(sample("p/0#1", 4)), version=4, most=0, then="stop")
    with pytest.raises(WrongWeights, match=r"'p/0#1'.*tokens 2 to 4 .* version 3.*given version 4"):
        settle_staleness(groups(sample("p/0#1", 4, 3)), version=4, most=0, then="stop")


@pytest.mark.parametrize("then", ["stop", "drop", "correct"])
def test_weights_that_do_not_exist_yet_are_never_believed(then) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WrongWeights, match="version 5"):
        settle_staleness(groups(sample("p/0#1", 4, 5)), version=4, most=9, then=then)


def test_stale_responses_leave_their_group_and_are_counted() -> None:
    given = groups(sample("fresh", 4), sample("edge", 2, 4), sample("old", 1, 4))
    kept, staleness = settle_staleness(given, version=4, most=2, then="drop")
    assert [s.sample_id for s in kept[0].samples] == ["fresh", "edge"]
    assert merge_counts([staleness.counts()] * 2, "rollout") == {
        "rollout/stale_responses": 2.0,
        "rollout/staleness_mean": pytest.approx((0 + 2 + 3) / 3),
    }


def test_with_a_correction_stale_responses_stay_and_are_counted() -> None:
    given = groups(sample("fresh", 4), sample("old", 1))
    kept, staleness = settle_staleness(given, version=4, most=0, then="correct")
    assert [s.sample_id for s in kept[0].samples] == ["fresh", "old"]
    assert staleness.stale == 1
