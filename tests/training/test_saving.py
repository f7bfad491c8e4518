"""Checkpoints that are written behind the training: of the moment of the call, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import UserError
from megarl.training.folder import refuse_used_folder
from megarl.training.saving import _prune
from tests.ranks import RankFailed, RankPool
from tests.training.jobs import (
    behind_job,
    demonstrations_job,
    extras_job,
    failing_disk_job,
    killed_job,
    other_format_job,
    resume_job,
    same,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behind")


@pytest.fixture(scope="module")
def behind(ranks: RankPool, folder: Path) -> dict[str, Any]:
    return ranks.run(2, behind_job, folder=folder)[0]


@pytest.fixture(scope="module")
def resumed(ranks: RankPool, folder: Path, behind: dict[str, Any]) -> dict[str, Any]:
    return ranks.run(2, resume_job, folder=folder, steps=2)[0]


def test_training_goes_on_while_a_checkpoint_is_written(behind: dict[str, Any]) -> None:
    assert behind["unfinished"] == []
    assert behind["kept"] == ["step_000002"]
    assert not same(behind["saved"], behind["trained"])


def test_it_holds_the_weights_of_the_call_whatever_training_did_since(
    behind: dict[str, Any], resumed: dict[str, Any]
) -> None:
    assert resumed["step"] == 2
    assert same(behind["saved"], resumed["loaded"])


def test_a_run_that_resumes_from_it_is_bit_identical(behind: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Moments, schedule, random states and the prompt stream are those of the call, too."""
    assert same(behind["trained"], resumed["trained"])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("model.dtype=bfloat16", r"saved with model\.dtype='auto', the config says 'bfloat16'"),
        (
            "model.transformer={layernorm_epsilon: 0.1}",
            r"model\.transformer=\{\}, .* says \{'layernorm_epsilon': 0\.1\}",
        ),
        ("model.template_options={short: true}", r"model\.template_options=\{\}, the config says"),
    ],
)
def test_resuming_with_another_model_says_what_differs(
    model: str, says: str, ranks: RankPool, folder: Path, behind: dict[str, Any]
) -> None:
    with pytest.raises(RankFailed, match=says):
        ranks.run(2, resume_job, folder=folder, steps=0, model=model)


def test_how_the_model_runs_and_where_it_lies_may_change_when_a_run_resumes(
    ranks: RankPool, folder: Path, behind: dict[str, Any], quickstart: Path
) -> None:
    moved = folder / "moved"
    shutil.copytree(quickstart.parent / "model", moved)
    model = f"model={{path: {moved}, transformer: {{moe_token_dispatcher_type: allgather}}}}"
    assert same(behind["saved"], ranks.run(2, resume_job, folder=folder, steps=0, model=model)[0]["loaded"])
    (weights,) = moved.glob("*.safetensors")
    held = bytearray(weights.read_bytes())
    held[-1] ^= 1
    weights.write_bytes(held)
    with pytest.raises(RankFailed, match=r"saved with model\.path=.*, the config says '.*moved'"):
        ranks.run(2, resume_job, folder=folder, steps=0, model=model)


@pytest.mark.parametrize("asynchronous", ["off", "on"])
def test_a_reference_and_a_critic_are_saved_beside_the_policy(
    asynchronous: str, ranks: RankPool, tmp_path: Path
) -> None:
    arguments = {"folder": tmp_path, "algorithm": "algorithm={name: ppo, kl: k3}"}
    job = ranks.run(2, extras_job, asynchronous=asynchronous, **arguments)[0]
    saved = job["saved"]
    assert same(saved, job["untouched"])
    assert not any(torch.equal(tensor, job["changed"][name]) for name, tensor in saved.items())
    loaded = ranks.run(2, resume_job, steps=0, **arguments)[0]["loaded"]
    assert loaded.keys() == saved.keys()
    assert same(saved, loaded)


def test_a_disk_that_refuses_one_rank_is_told_alike_in_both_ways(ranks: RankPool, tmp_path: Path) -> None:
    told = {}
    for asynchronous in ("off", "on"):
        (tmp_path / asynchronous).mkdir()
        result = ranks.run(2, failing_disk_job, folder=tmp_path / asynchronous, asynchronous=asynchronous)[0]
        one, three = "step_000001", "step_000003"
        assert result["kept"] == [[one], [one], [one, three]]
        told[asynchronous] = [line for line in result["told"].splitlines() if line.startswith("warning:")]
    assert told["on"] == told["off"]
    (line,) = told["on"]
    assert line.startswith("warning: /run/checkpoints/step_000002: the checkpoint could not be written")
    assert "earlier checkpoints are untouched" in line


def test_killed_while_a_checkpoint_is_written_a_run_goes_on_from_the_one_before(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        ranks.run(2, killed_job, folder=tmp_path)
    written = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert written == ["step_000001", "step_000002.writing"]
    assert ranks.run(2, resume_job, folder=tmp_path, steps=1)[0]["step"] == 1


def test_a_cold_start_goes_on_with_the_demonstrations_it_began_with_or_not_at_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    told = [
        ranks.run(2, demonstrations_job, folder=tmp_path, response=response)[0]
        for response in ("2", "2", "3")
    ]
    assert told[:2] == ["begun", "resumed at 2"]
    assert "step_000002: its cold start learned from other demonstrations (1 conversations" in told[2]


def test_pruning_takes_this_runs_oldest_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    """By number, not by name; neither the best, nor what a user has set aside under another name."""
    for step, score in ((99, 0.5), (999_998, 0.1), (999_999, 0.2), (1_000_000, None), (2_000_000, None)):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"score": score}))
    others = ["step_000001_mine", "step_000002.bak", "step_1", "steps", "step_000003.writing"]
    for name in others:
        (tmp_path / name).mkdir()
    _prune(tmp_path / "step_1000000", keep=2)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*others, "step_000099", "step_999999", "step_1000000"}


@pytest.mark.parametrize(
    ("left", "resumed"),
    [
        ("metrics.jsonl", True),
        ("samples/step_000010.jsonl", True),
        ("tensorboard/events", True),
        ("wandb/run", True),
        ("hf/config.json", False),
        ("checkpoints/step_000010/state.json", False),
    ],
)
def test_a_run_that_begins_anew_refuses_what_another_one_left(
    left: str, resumed: bool, tmp_path: Path
) -> None:
    """Also one that finds no good checkpoint to resume from, where it would delete what is left."""
    refuse_used_folder(tmp_path, resume=False)
    file = tmp_path / left
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("left")
    with pytest.raises(UserError, match=f"{tmp_path / left.split('/')[0]} already holds .* another name"):
        refuse_used_folder(tmp_path, resume=False)
    if resumed:
        refuse_used_folder(tmp_path, resume=True)
    else:
        with pytest.raises(UserError, match="no good checkpoint of it is there"):
            refuse_used_folder(tmp_path, resume=True)
    assert file.read_text() == "left"


def test_a_checkpoint_of_another_version_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(1, other_format_job, folder=tmp_path)[0]
    assert "step_000001: saved by another version of megarl" in told
