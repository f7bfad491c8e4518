"""A critic learns the values of a problem whose values are known, in any layout; a reference stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.jobs import critic_job, reference_job
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_checkpoint: Path) -> dict[str, float]:
    return ranks.run(1, critic_job, checkpoint=moe_checkpoint, layout={}, steps=60)[0]


def test_a_critic_learns_the_values_of_a_toy_problem(one_rank: dict[str, float]) -> None:
    """Half of the returns are 1, half 0: an error of 0.25 knows their mean, one near 0 knows them."""
    assert 0.3 < one_rank["before"] < 0.8  # values of zero: the share of ones
    assert one_rank["after"] < 0.05


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {"context": 2}), (2, {"expert": 2})],
    ids=lambda value: "x".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_its_gradient_is_that_of_one_rank(
    size: int, layout: dict[str, Any], ranks: RankPool, moe_checkpoint: Path, one_rank: dict[str, float]
) -> None:
    """The second step's norm depends on the first step's whole update."""
    got = ranks.run(size, critic_job, checkpoint=moe_checkpoint, layout=layout, steps=2)[0]
    assert got["first_norm"] == pytest.approx(one_rank["first_norm"], rel=1e-4)
    assert got["second_norm"] == pytest.approx(one_rank["second_norm"], rel=1e-3)


@pytest.mark.parametrize(("size", "layout"), [(1, {}), (2, {"expert": 2}), (2, {"pipeline": 2})])
def test_a_reference_is_the_policy_of_when_it_was_made(
    size: int, layout: dict[str, Any], ranks: RankPool, moe_checkpoint: Path
) -> None:
    ranks.run(size, reference_job, checkpoint=moe_checkpoint, layout=layout)
