"""A gradient that is not finite, on whichever rank, changes nothing on any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.jobs import not_finite_job
from tests.ranks import RankPool
from tests.weights.families import make

pytestmark = pytest.mark.distributed


def check(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["stepped"] == [True, False, True, False, True] * 2
        assert found["unchanged"] == [False, True, False, True, False] * 2
        assert [math.isfinite(norm) for norm in found["norms"]] == found["stepped"]
        assert found["as_unbroken"] == [True, True]
        assert found["taken"] == 3


@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        (1, {}, {"dtype": "bfloat16"}),
        (2, {"expert": 2}, {}),
        (2, {}, {"distributed_optimizer": False}),
        (2, {"tensor": 2}, {}),
        (2, {"pipeline": 2}, {}),
    ],
    ids=lambda value: ",".join(map(str, value)) or "alone" if isinstance(value, dict) else "",
)
def test_the_loss_of_one_rank_alone_is_nan_or_infinite(
    size: int, layout: dict[str, Any], options: dict[str, Any], ranks: RankPool, moe_checkpoint: Path
) -> None:
    """Neither weights nor moments, step counts or the learning rate; of the policy or the critic."""
    check(ranks.run(size, not_finite_job, checkpoint=moe_checkpoint, layout=layout, **options))


def test_a_routers_bias_does_not_move_either(ranks: RankPool, tmp_path: Path) -> None:
    checkpoint = make("deepseek-v3", tmp_path / "model")
    options = {"load_balancing": "bias", "load_balancing_rate": 0.01}
    check(ranks.run(1, not_finite_job, checkpoint=checkpoint, layout={}, **options))
