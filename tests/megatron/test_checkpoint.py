"""A checkpoint holds everything a training step depends on, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.megatron.jobs import checkpoint_job
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "EP2xDP2": (4, {"expert": 2}),
    "TP2xEP2": (4, {"tensor": 2, "expert": 2}),
}


@pytest.fixture(scope="module")
def saved(ranks: RankPool, moe_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with TP2."""
    folder = tmp_path_factory.mktemp("resharding") / "saved"
    ranks.run(2, checkpoint_job, phase="save", checkpoint=moe_checkpoint, folder=folder, layout={"tensor": 2})
    return folder


@pytest.fixture(scope="module")
def straight(ranks: RankPool, moe_checkpoint: Path) -> dict[str, Any]:
    """Four steps on one rank."""
    return ranks.run(
        1, checkpoint_job, phase="straight", checkpoint=moe_checkpoint, folder=Path("/nowhere"), layout={}
    )[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_layout_saved_another_goes_on_with(
    name: str, ranks: RankPool, moe_checkpoint: Path, saved: Path, straight: dict[str, Any]
) -> None:
    """Two more steps: only with the right moments and step count do they end where four in one go do."""
    size, layout = LAYOUTS[name]
    got = ranks.run(
        size, checkpoint_job, phase="load", checkpoint=moe_checkpoint, folder=saved, layout=layout
    )[0]
    assert got["rates"] == straight["rates"][2:]
    for tensor, expected in straight["weights"].items():
        torch.testing.assert_close(got["weights"][tensor], expected, atol=2e-5, rtol=0, msg=tensor)


def test_saving_and_loading_in_the_middle_changes_no_bit(
    ranks: RankPool, moe_checkpoint: Path, tmp_path: Path
) -> None:
    def run(phase: str) -> dict:
        arguments = {"checkpoint": moe_checkpoint, "folder": tmp_path / "saved", "layout": {"expert": 2}}
        return ranks.run(2, checkpoint_job, phase=phase, timeout=60, **arguments)[0]

    straight, saved, loaded = run("straight"), run("save"), run("load")
    assert saved["rates"] + loaded["rates"] == straight["rates"]
    assert len(set(straight["rates"])) > 1
    for name, expected in straight["weights"].items():
        assert torch.equal(loaded["weights"][name], expected), name


def test_a_pipeline_stage_without_experts_saves_and_loads_too(ranks: RankPool, tmp_path: Path) -> None:
    """The first stage's only layer is dense, so its ranks' optimizer of expert weights is empty."""
    model = models.tiny_qwen3_moe(tmp_path / "model", num_hidden_layers=2, mlp_only_layers=[0])

    def run(phase: str) -> dict[str, Any]:
        arguments = {"folder": tmp_path / "saved", "layout": {"pipeline": 2, "expert": 2}}
        return ranks.run(4, checkpoint_job, checkpoint=model, phase=phase, **arguments)[0]

    straight, _, loaded = run("straight"), run("save"), run("load")
    for name, expected in straight["weights"].items():
        assert torch.equal(loaded["weights"][name], expected), name
