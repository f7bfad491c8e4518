"""A whole update is the same in every layout: passes, advantages, routes, critic and reference, steps, metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.ranks import RankPool
from tests.training.layout_jobs import engine_job, updates_job

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "DP2": (2, {}, {}),
    "PP2xVPP2, full recompute": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": "full"}),
    "TP2xCP2": (4, {"tensor": 2, "context": 2}, {}),
}


@pytest.fixture(scope="module")
def engine(ranks: RankPool, moe_checkpoint: Path) -> dict[str, np.ndarray]:
    return ranks.run(1, engine_job, checkpoint=moe_checkpoint)[0]


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_checkpoint: Path, engine: dict[str, np.ndarray]) -> dict[str, Any]:
    return ranks.run(1, updates_job, checkpoint=moe_checkpoint, layout={}, engine=engine)[0]


def tolerance(name: str, value: float) -> Any:
    """A quantile is read off a histogram, which knows its logarithm to 1.5%."""
    if name.endswith(("_p01", "_p50", "_p99")):
        return pytest.approx(value, abs=0.03 * abs(math.log(value)) + 1e-5)
    return pytest.approx(value, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_updates_are_those_of_one_rank(
    name: str,
    ranks: RankPool,
    moe_checkpoint: Path,
    engine: dict[str, np.ndarray],
    one_rank: dict[str, Any],
) -> None:
    size, layout, options = LAYOUTS[name]
    arguments = {"checkpoint": moe_checkpoint, "layout": layout, "engine": engine, **options}
    parts = ranks.run(size, updates_job, timeout=240, **arguments)
    start = load_file(moe_checkpoint / "model.safetensors")
    for recipe, expected in one_rank.items():
        for part in parts:
            assert part[recipe]["metrics"] == [
                {key: tolerance(key, value) for key, value in metrics.items()}
                for metrics in expected["metrics"]
            ], recipe
        assert parts[0][recipe]["weights"].keys() == expected["weights"].keys() == start.keys()
        for tensor, weight in expected["weights"].items():
            moved = (weight - start[tensor]).norm()
            assert (parts[0][recipe]["weights"][tensor] - weight).norm() < 1e-3 * moved, (recipe, tensor)


def test_the_updates_are_ones_that_can_go_wrong(one_rank: dict[str, Any]) -> None:
    """All metrics are numbers, every mini-batch is a step, ratios are clipped, routes differ from live ones, the
    reference is not the policy."""
    for recipe, result in one_rank.items():
        first, second = result["metrics"]
        assert all(math.isfinite(value) for value in (first | second).values()), recipe
        assert first["train/optimizer_steps"] == second["train/optimizer_steps"] == 3
        assert 0 < second["train/clip_fraction"] < 1
        assert second["routing/flip_share_last"] > 0.01
        assert first.get("train/kl", 1) != 0
