"""The load-balancing modes: off unless asked for, the same gradient in every layout, a bias that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import UserError
from megarl.megatron.model import transformer_config
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout, ModelSettings
from megarl.weights.checkpoint_files import read_config
from megarl.weights.families import family_of
from tests.megatron.jobs import balance_job, bias_job
from tests.ranks import RankPool
from tests.weights.families import make

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_checkpoint: Path) -> dict[str, torch.Tensor]:
    return ranks.run(1, balance_job, checkpoint=moe_checkpoint, layout={}, load_balancing="aux_loss")[0]


def test_off_by_default_nothing_pulls_at_the_routers(ranks: RankPool, moe_checkpoint: Path) -> None:
    gradients = ranks.run(1, balance_job, checkpoint=moe_checkpoint, layout={})[0]
    assert gradients
    assert not any(g.any() for g in gradients.values())


def test_the_auxiliary_loss_is_a_mean_over_tokens(
    ranks: RankPool, moe_checkpoint: Path, one_rank: dict[str, torch.Tensor]
) -> None:
    """Its gradient is linear in the coefficient, and of a size that doesn't know how many tokens there were."""
    larger = ranks.run(
        1,
        balance_job,
        checkpoint=moe_checkpoint,
        layout={},
        load_balancing="aux_loss",
        load_balancing_rate=2e-3,
    )[0]
    for name, gradient in one_rank.items():
        assert 0 < gradient.norm() < 1e-2
        torch.testing.assert_close(larger[name], 2 * gradient, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}], ids=lambda layout: next(iter(layout))
)
def test_its_gradient_is_that_of_one_rank(
    layout: dict[str, Any], ranks: RankPool, moe_checkpoint: Path, one_rank: dict[str, torch.Tensor]
) -> None:
    got = ranks.run(2, balance_job, checkpoint=moe_checkpoint, layout=layout, load_balancing="aux_loss")[0]
    for name, expected in one_rank.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-3, atol=1e-8)


def test_a_bias_is_updated_kept_and_streamed(ranks: RankPool, tmp_path: Path) -> None:
    checkpoint = make("deepseek-v3", tmp_path / "model")
    found = ranks.run(2, bias_job, checkpoint=checkpoint, folder=tmp_path / "saved")[0]
    assert found["before"].keys() == found["after"].keys()
    assert found["after"]
    for name, after in found["after"].items():
        moved = (after - found["before"][name]).abs()
        assert moved.max() == pytest.approx(0.02)  # two updates by the rate
        assert torch.equal(found["loaded"][name], after)


def test_a_bias_needs_a_router_that_has_one(moe_checkpoint: Path) -> None:
    config = read_config(moe_checkpoint)
    settings = ModelSettings(dtype="float32", load_balancing="bias")
    with pytest.raises(UserError, match="does not have"):
        transformer_config(family_of(config).architecture(config), Layout(), Platform.detect("cpu"), settings)
