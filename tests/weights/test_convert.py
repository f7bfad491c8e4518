"""`megarl convert`: Hugging Face -> Megatron -> Hugging Face gives the same bits, whatever the layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli import main
from megarl.errors import UserError
from megarl.launcher import fewest_ranks
from megarl.megatron.settings import Layout
from megarl.weights.convert import check
from tests.disk import full_disk
from tests.forks import Finished, run_megarl
from tests.models import tiny_tokenizer
from tests.ranks import RankFailed, RankPool
from tests.weights.families import make
from tests.weights.jobs import convert_job, trained_checkpoint_job

pytestmark = pytest.mark.distributed


def megarl(*words: str) -> Finished:
    return run_megarl("convert", *words, COLUMNS="160")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_bits(expected: Path, got: Path) -> None:
    before, after = tensors(expected), tensors(got)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make("deepseek-v3", tmp_path_factory.mktemp("source") / "v3")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def megatron(source: Path) -> Path:
    """Made by the command on one process, without torchrun."""
    target = source.with_name("megatron")
    result = megarl(str(source), str(target))
    assert result.returncode == 0, result.stderr
    assert "Megatron checkpoint, deepseek_v3" in result.stdout
    return target


def test_there_and_back_in_another_layout_gives_the_same_bits(
    source: Path, megatron: Path, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    result = megarl(str(megatron), str(back), "--tensor", "2", "--expert", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Hugging Face folder, deepseek_v3") == 1
    assert_same_bits(source, back)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    config, original = (json.loads((f / "config.json").read_text()) for f in (back, source))
    assert config == original


def test_the_command_refuses_in_one_message(
    source: Path, megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["convert", str(source), str(megatron)])
    assert refused.value.code == 2
    assert "exists already; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor 3", "parallel.tensor: 3 does not divide the model's 4 attention heads"),
        ("--expert 3", "parallel.expert: 3 does not divide the model's 8 experts"),
        ("--pipeline 5", "parallel.pipeline: 3 layers leave one of 5 stages empty"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused_before_ranks_are_started(
    words: str, message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["convert", str(source), str(tmp_path / "target"), *words.split()])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("direction", ["huggingface", "megatron"])
def test_a_full_disk_is_told_and_leaves_no_target(
    direction: str, source: Path, megatron: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with full_disk(20_000):
        result = megarl(str(source if direction == "huggingface" else megatron), str(target))
    assert result.returncode == 2, result.stderr
    assert f"{target}: cannot be written (File too large)" in result.stderr
    assert "Traceback" not in result.stderr
    assert not target.exists()


def test_more_ranks_than_a_machine_has_are_refused() -> None:
    with pytest.raises(UserError, match="nor any other up to 4096; lower the degrees"):
        fewest_ranks(Layout(tensor=64, pipeline=64, expert=64))


def test_what_every_rank_finds_wrong_is_told_once(source: Path, tmp_path: Path) -> None:
    other = shutil.copytree(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    result = megarl(str(other), str(tmp_path / "target"), "--tensor", "2")
    assert result.returncode == 2
    assert result.stderr.count("config.json and tensors disagree: 'model.embed_tokens.weight'") == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "target").exists()


def test_a_pipeline_converts_and_another_model_is_refused(
    ranks: RankPool, megatron: Path, tmp_path: Path
) -> None:
    source = make("olmoe", tmp_path / "olmoe")
    target, back = tmp_path / "megatron", tmp_path / "back"
    ranks.run(2, convert_job, source=source, target=target, layout={"pipeline": 2}, timeout=240)
    ranks.run(2, convert_job, source=target, target=back, layout={"tensor": 2}, timeout=240)
    assert_same_bits(source, back)
    with pytest.raises(RankFailed, match=r"not a whole checkpoint of the model in config\.json"):
        ranks.run(
            1,
            convert_job,
            source=megatron,
            target=tmp_path / "none",
            layout={},
            config_folder=source,
            timeout=240,
        )
    assert not (tmp_path / "none").exists()


def test_the_weights_of_a_training_checkpoint_are_converted(ranks: RankPool, tmp_path: Path) -> None:
    source = make("qwen3-moe", tmp_path / "moe")
    trained = tmp_path / "trained"
    weights = ranks.run(
        2, trained_checkpoint_job, folder=source, written=trained, layout={"expert": 2}, timeout=240
    )[0]
    with pytest.raises(UserError, match=r"no config\.json; name the Hugging Face folder .* with --config"):
        check(trained, tmp_path / "back", None, Layout())
    ranks.run(
        1,
        convert_job,
        source=trained,
        target=tmp_path / "back",
        layout={},
        config_folder=source,
        timeout=240,
    )
    back = tensors(tmp_path / "back")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    assert not torch.equal(back["model.norm.weight"], tensors(source)["model.norm.weight"])


def test_what_cannot_be_converted_is_refused_before_anything_starts(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        check(tmp_path / "nowhere", tmp_path / "target", None, Layout())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"neither a Hugging Face folder .* nor a Megatron checkpoint"):
        check(empty, tmp_path / "target", None, Layout())
    other = shutil.copytree(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(UserError, match=r"other/config\.json: architecture FooForCausalLM is not supported"):
        check(other, tmp_path / "target", None, Layout())
