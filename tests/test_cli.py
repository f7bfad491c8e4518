"""The command line: every command does its work over the real rooms, and a mistake is one message and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def megarl(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-m", "megarl", *words], capture_output=True, text=True, timeout=120, env=environment
    )


def test_help_names_every_command() -> None:
    result = megarl("--help")
    assert result.returncode == 0
    for command in ("train", "check", "algorithms", "report", "verify", "convert", "config", "data"):
        assert f" {command} " in result.stdout


def test_a_recipe_is_shown_with_its_source_and_defaults() -> None:
    result = megarl("algorithms", "gspo")
    assert result.returncode == 0
    assert "2507.18071" in result.stdout
    assert "0.0003" in result.stdout


def test_check_names_what_a_run_would_do() -> None:
    result = megarl("check", QUICKSTART, "algorithm={name: grpo, kl: none, routing_replay: off}")
    assert result.returncode == 0, result.stderr
    assert "grpo on 2 ranks, old log-probabilities: recompute" in result.stdout


def test_check_knows_a_mixture_of_experts_by_its_architecture(tmp_path: Path) -> None:
    file = tmp_path / "mixtral.yaml"
    file.write_text(
        "model: {make: {model_type: mixtral, hidden_size: 64}, tokenizer: tiny}\n"
        "data: {sources: [{kind: reasoning_gym, task: chain_sum}]}\n"
    )
    result = megarl("check", str(file), "algorithm={name: grpo, routing_replay: engine}")
    assert result.returncode == 0, result.stderr
    dense = megarl(
        "check", str(file), "model.make.model_type=qwen3", "algorithm={name: grpo, routing_replay: engine}"
    )
    assert "this one is dense" in dense.stderr


def test_verify_prints_the_confusion_against_the_labels(tmp_path: Path) -> None:
    rows = [("\\boxed{16}", "016", True), ("\\boxed{12}", "1,2", False), ("five", "5", True)]
    file = tmp_path / "responses.jsonl"
    file.write_text("".join(json.dumps({"response": r, "answer": a, "label": v}) + "\n" for r, a, v in rows))
    result = megarl("verify", str(file), "--verifier", "math", "--answer", "answer")
    assert result.returncode == 0, result.stderr
    assert "agreement 0.6667" in result.stdout


def test_data_inspect_takes_columns_a_split_and_a_format(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt.jsonl").write_text('{"q": "one?", "gold": "1"}\n')
    mistaken = megarl("data", "inspect", str(tmp_path))
    assert mistaken.returncode == 2
    assert "Set split" in mistaken.stderr
    words = ("-c", "question=q", "-c", "answer=gold", "--split", "test", "--format", "jsonl")
    result = megarl("data", "inspect", str(tmp_path), *words)
    assert result.returncode == 0, result.stderr
    assert "one?" in result.stdout


def test_data_inspect_counts_rows_and_shows_prompts() -> None:
    result = megarl(
        "data", "inspect", str(ROOT / "tests" / "data" / "datasets" / "gsm8k.jsonl"), "--samples", "1"
    )
    assert result.returncode == 0, result.stderr
    assert "rows 3" in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("check", QUICKSTART, "rl.stps=3"), "unknown key 'rl.stps'. Did you mean 'steps'?"),
        (("check", QUICKSTART, "sampling.top_p=0.9"), "or set algorithm.old_logprobs=recompute"),
        (("check", QUICKSTART, "rl.stale_responses=correct"), "gspo has no correction"),
        (
            ("check", QUICKSTART, "rl.prompts_per_step=33"),
            "rl.prompts_per_step=33 can't be shared out equally to 2",
        ),
        (("check", QUICKSTART, "sft.batch_size=1"), "sft.batch_size=1 can't be shared out"),
        (
            (
                "check",
                QUICKSTART,
                "algorithm=dapo",
                "rl.minibatches=null",
                "rl.prompts_per_step=2",
                "rl.group_size=4",
            ),
            "2 prompts x 4 responses are fewer than the 16 mini-batches of dapo",
        ),
        (("check", QUICKSTART, "model.make=null", "model.path=/nowhere"), "/nowhere: no such folder"),
        (("check", QUICKSTART, "model.make.hidden_sise=3"), "Did you mean 'hidden_size'"),
        (("check", QUICKSTART, "sampling.max_new_tokens=256"), "sampling.max_new_tokens=256 leaves no room"),
        (("check", "/nowhere.yaml"), "/nowhere.yaml: no such file"),
        (("algorithms", "gpso"), "Did you mean 'gspo'"),
        (("config", "explain", "rl.stps"), "Did you mean 'steps'"),
        (("verify", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("data", "inspect", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("data", "inspect", "/nowhere.jsonl", "--chat-template", "x"), "--chat-template needs --tokenizer"),
        (("report", "/nowhere"), "/nowhere"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_message_and_exit_code_2(words: tuple[str, ...], told: str) -> None:
    result = megarl(*words)
    assert result.returncode == 2, result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_under_torchrun_a_mistake_in_the_file_is_told_by_one_rank() -> None:
    ranks = [megarl("train", QUICKSTART, "rl.stps=3", RANK=rank, WORLD_SIZE="2") for rank in ("0", "1")]
    assert [r.returncode for r in ranks] == [2, 2]
    assert "Did you mean 'steps'" in ranks[0].stderr
    assert ranks[1].stderr == ""
