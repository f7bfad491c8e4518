"""What two replicas sample, in steps that drop groups here and there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.records import Group
from tests.ranks import RankPool
from tests.training.sampling_jobs import sampling_job

pytestmark = pytest.mark.distributed

STEPS = 4


@pytest.fixture(scope="module")
def replicas(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, quickstart: Path) -> list[Any]:
    """Of two replicas: four steps, then the last three of them after a resume. Half of the groups are dropped."""
    folder = tmp_path_factory.mktemp("sampling", numbered=True)
    words = ("rl.prompts_per_step=4", "rl.group_size=2", "rl.sampling_rounds=3", "rewards.soft_overlong=4")
    return ranks.run(2, sampling_job, folder=folder, steps=STEPS, words=("algorithm=dapo", *words))


def prompts_of(groups: list[Group]) -> list[str]:
    return [group.prompt.prompt_id for group in groups]


def contents(groups: list[Group]) -> list[Any]:
    return [(s.sample_id, s.response_ids.tolist(), s.reward, g.dropped) for g in groups for s in g.samples]


def test_replicas_never_sample_the_same_prompts_and_lose_none(replicas: list[Any]) -> None:
    """Whatever each of them drops: an epoch is every prompt once. (Forty prompts; the second epoch begins anew.)"""
    lacking = [[sum(g.dropped is not None for g in step["groups"]) for step in one] for one in replicas]
    assert lacking[0] != lacking[1], "this would show nothing"
    drawn = [p for step in range(STEPS) for one in replicas for p in prompts_of(one[step]["groups"])]
    assert len(drawn) > 20
    epochs = Counter(drawn).values()
    assert max(epochs) - min(epochs) <= 1
    assert len(set(drawn)) == min(40, len(drawn))


def test_every_response_of_a_step_has_a_name_and_a_seed_of_its_own(replicas: list[Any]) -> None:
    for step in range(STEPS):
        samples = [s for one in replicas for g in one[step]["groups"] for s in g.samples]
        assert len({s.sample_id for s in samples}) == len(samples)
        places = {s.sample_id.split("#")[1] for s in samples}
        assert len(places) == len(samples), "also where it is a response to the same prompt"


def test_the_prompt_streams_of_all_replicas_stand_at_the_same_place(replicas: list[Any]) -> None:
    for first, second in zip(*replicas, strict=True):
        assert first["state"] == second["state"]
    drawn = sum(len(one[step]["groups"]) for one in replicas for step in range(STEPS))
    (source,) = replicas[0][STEPS - 1]["state"]["stream"]["sources"].values()
    assert source["drawn"] == drawn, "and no further"


def test_a_resumed_run_samples_what_an_unbroken_one_does(replicas: list[Any]) -> None:
    for one in replicas:
        for whole, resumed in zip(one[1:STEPS], one[STEPS:], strict=True):
            assert contents(whole["groups"]) == contents(resumed["groups"])
            assert whole["state"] == resumed["state"]


def test_overlong_responses_are_punished_after_groups_were_chosen(replicas: list[Any]) -> None:
    """A dropped group keeps its rewards as they were scored, and was chosen by them."""
    groups = [g for one in replicas for step in one for g in step["groups"]]
    for group in groups:
        verdicts = [s.reward_parts["tests.training.golden:even"] for s in group.samples]
        assert (group.dropped is not None) == (len(set(verdicts)) == 1)
        for sample in group.samples:
            assert ("soft_overlong" in sample.reward_parts) == (group.dropped is None)
    punished = [s for g in groups for s in g.samples if s.reward_parts.get("soft_overlong")]
    assert punished, "this would show nothing"
