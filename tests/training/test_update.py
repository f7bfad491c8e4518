"""Learning and evaluating in a run of two replicas."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.monitor.metrics import default_registry
from megarl.rollout.sampling import merge_counts, rollout_counts
from tests.ranks import RankPool
from tests.rollout.test_filters import group, response
from tests.training.golden import FILE as GOLDEN
from tests.training.jobs import (
    distrust_job,
    left_out_job,
    logged_job,
    not_finite_job,
    other_routes_job,
)

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("algorithm", ["gspo", "reinforce_pp", "ppo"])
def test_a_replica_or_a_mini_batch_may_have_nothing_left(
    algorithm: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Also where advantages wait for passes over whole responses (reinforce_pp, ppo)."""
    words = {"folder": tmp_path, "algorithm": f"algorithm={{name: {algorithm}, dynamic_sampling: true}}"}
    results = ranks.run(2, left_out_job, **words)
    one, none, second = results[0]
    assert (one["train/optimizer_steps"], one["train/skipped_steps"]) == (2, 0)
    assert one["train/active_responses"] == 8
    assert math.isfinite(one["train/loss"])
    assert (none["train/optimizer_steps"], none["train/skipped_steps"]) == (0, 2)
    assert [m["train/unscored_responses"] for m in (one, none, second)] == [0, 0, 8]
    assert (second["train/optimizer_steps"], second["train/skipped_steps"]) == (1, 1)
    for learned in (one, second):  # engine and trainer are compared on the first mini-batch that there is
        assert learned["mismatch/tokens"] > 0
        assert learned["train/micro_batches"] == sum(result[0]["made"] for result in results)


@pytest.fixture(scope="module")
def logged(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, quickstart: Path
) -> dict[str, dict[str, float]]:
    parts = "kl: k3, kl_coef: 0.1, off_policy_delta: 0.1, routing_replay: engine"
    folder = tmp_path_factory.mktemp("logged")
    return ranks.run(2, logged_job, folder=folder, learns=f"algorithm={{name: minirl, {parts}}}")[0]  # type: ignore[no-any-return]


def test_every_held_out_set_is_evaluated_by_itself_too(logged: dict[str, dict[str, float]]) -> None:
    metrics = logged["evaluation"]
    assert metrics["eval/prompts"] == 16 + 3 + 3
    for name in ("chain_sum", "two.sums", "b"):
        assert 0 <= metrics[f"eval/{name}/accuracy"] <= 1
        assert 1 <= metrics[f"eval/{name}/response_length_mean"] <= 8


def test_every_registered_metric_is_logged_and_every_logged_metric_is_registered(
    logged: dict[str, dict[str, float]],
) -> None:
    """By these steps or those of the golden trajectories, which `test_golden.py` holds by name and value; and what
    happens only where something goes wrong, by the function that counts it."""
    registry = default_registry()
    names = {name for metrics in logged.values() for name in metrics}
    names |= {name for run in json.loads(GOLDEN.read_text()).values() for step in run for name in step}
    wrong = [replace(group(response(5, None)), dropped="same_reward")]
    names |= merge_counts([rollout_counts(wrong)], "rollout").keys()
    assert [name for name in names if name not in registry] == []
    found = {registry[name].name for name in names}
    assert [metric.name for metric in registry if metric.name not in found] == []


def test_an_engine_is_not_believed(ranks: RankPool, tmp_path: Path) -> None:
    """Missing routes and weights of another version stop a step before the policy changes; a sync that went wrong is
    noticed at once."""
    result = ranks.run(2, distrust_job, folder=tmp_path)[0]
    told = result["told"]
    assert re.match(
        r"RoutingError: sample 'chain_sum/.*#1\.0\.0': the engine returned no routes", told["no routes"]
    )
    assert re.match(
        r"WrongWeights: sample 'chain_sum/.*#2\.0\.0': .* version 0, .* given version 1", told["behind"]
    )
    assert result["unchanged"]
    assert re.match(
        r"SyncFailed: .* version 1 .* 1 of \d+ tensors differ, first 'model.norm.weight'", told["another bit"]
    )


def test_given_routes_are_followed_by_every_pass_over_the_policy_and_by_no_other(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Other experts than the engine's: far from the engine and from the live reference, but at the ratio 1 to the
    recompute pass, which follows them too. The audit, afterwards and live, finds engine and trainer equal."""
    algorithm = "algorithm={name: grpo, kl: k3, old_logprobs: recompute, routing_replay: engine}"
    metrics = ranks.run(2, other_routes_job, folder=tmp_path, algorithm=algorithm)[0]
    assert metrics["routing/flip_share_first"] > 0.5
    assert metrics["train/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/ratio_min"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch/abs_diff_max"] > 0.01
    assert metrics["train/kl"] > 1e-6
    assert 0 < metrics["audit/abs_diff_max"] < 1e-4


def test_the_engines_log_probabilities_are_compared_with_the_trainers(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Not with themselves, where they are the old ones: they differ, if only by rounding. The engine's routes are
    compared, too, and not followed."""
    metrics = ranks.run(2, other_routes_job, folder=tmp_path, algorithm="algorithm=gspo")[0]
    assert metrics["routing/flip_share_first"] > 0.5
    assert 0 < metrics["mismatch/abs_diff_max"] < 1e-4
    assert metrics["mismatch/abs_diff_max"] == pytest.approx(metrics["audit/abs_diff_max"], abs=1e-5)


@pytest.fixture(scope="module")
def not_finite(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, quickstart: Path
) -> list[dict[str, Any]]:
    return ranks.run(2, not_finite_job, folder=tmp_path_factory.mktemp("not finite"))


def test_a_step_that_is_not_finite_on_one_rank_is_counted_and_the_next_one_is_fine(
    not_finite: list[dict[str, Any]],
) -> None:
    """In both stages, and in the critic alone; the learning rate waits."""
    cold, (good, policy, critic) = not_finite[0]["cold start"], not_finite[0]["updates"]
    assert [step["sft/skipped_steps"] for step in cold] == [0, 1, 1]
    assert [math.isfinite(step["sft/grad_norm"]) for step in cold] == [True, False, True]
    assert [step["sft/lr"] / cold[0]["sft/lr"] for step in cold] == [1, 2, 2]
    assert (good["train/optimizer_steps"], good["train/skipped_steps"]) == (2, 0)
    assert (policy["train/optimizer_steps"], policy["train/skipped_steps"]) == (1, 1)
    assert (critic["train/optimizer_steps"], critic["train/skipped_steps"]) == (2, 1)
    assert math.isfinite(critic["train/loss"])
    for metrics in not_finite[1]["updates"][1:]:
        assert metrics["train/skipped_steps"] == 1, "the same on every rank"


def test_a_checkpoint_of_weights_that_are_not_finite_is_not_written_and_none_is_pruned_for_it(
    not_finite: list[dict[str, Any]],
) -> None:
    """The policy's or the critic's, on one rank alone: every rank refuses."""
    for one in not_finite:
        assert len(one["told"]) == 2
        for told in one["told"]:
            assert re.search(r"step_000005: not written, since weights are not finite", told)
        assert one["checkpoints"] == ["step_000004"]
        assert one["saved"] == ["step_000005"]
