"""The numbers of a run's first steps are those of the golden trajectories."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.training.golden import FILE, RECIPES, trajectory_job

pytestmark = pytest.mark.distributed


def tolerance(name: str, value: float) -> Any:
    """A quantile is read off a histogram, which knows its logarithm to 1.5%."""
    if name.endswith(("_p01", "_p50", "_p99")):
        return pytest.approx(value, abs=0.03 * abs(math.log(value)) + 1e-5)
    return pytest.approx(value, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_steps_are_the_golden_ones(name: str, ranks: RankPool, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text())[name]
    found = ranks.run(1, trajectory_job, folder=tmp_path, words=RECIPES[name])[0]
    assert found == [{key: tolerance(key, value) for key, value in step.items()} for step in expected]


def test_the_golden_steps_are_ones_that_can_go_wrong() -> None:
    """Rewards differ, gradients are no zeros, ratios leave 1, the policy moves."""
    for name, (first, second) in json.loads(FILE.read_text()).items():
        assert 0 < first["rollout/reward_mean"] < 1, name
        assert second["train/grad_norm"] > 1e-3, name
        assert second["train/ratio_max"] > 1.001, name
        assert first["train/loss"] != second["train/loss"], name
