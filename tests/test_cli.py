"""The command line: every command does its work over the real rooms, and a mistake is one message and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from transformers import MixtralConfig, Qwen3Config

from examples.quickstart.make import build_tokenizer
from megarl import cli
from megarl.cli import app
from megarl.config.load import load_config
from megarl.errors import UserError
from megarl.training.check import check_run
from tests.forks import ROOT, Finished, run_megarl

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


SCRIPT = "import sys; from megarl.cli import main\ntry: sys.exit(main())"


def megarl(*words: str, **variables: str) -> Finished:
    return run_megarl(*words, COLUMNS="160", **variables)


PROGRAMS = {
    "the module": [sys.executable, "-m", "megarl"],
    "the script": [sys.executable, "-c", f"{SCRIPT}\nfinally: pass"],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_new_process_ends_with_the_commands_exit_code_and_one_message(program: list[str]) -> None:
    result = subprocess.run([*program, "algorithms", "gpso"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("megarl: error: ")
    assert "Did you mean 'gspo'" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("check", QUICKSTART, "rl.stps=3"),
        ("train", QUICKSTART, "rl.stps=3"),
        ("config", "show", QUICKSTART),
    ],
    ids=lambda words: words[0],
)
def test_what_needs_no_model_does_not_import_torch(words: tuple[str, ...]) -> None:
    """Which takes seconds."""
    result = subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}\nfinally: print('torch' in sys.modules)", *words],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.stdout.splitlines()[-1] == "False", result.stderr


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


def test_check_names_what_a_run_would_do(quickstart: Path) -> None:
    result = megarl("check", str(quickstart), "algorithm={name: grpo, kl: none, routing_replay: off}")
    assert result.returncode == 0, result.stderr
    assert "grpo on 2 ranks, old log-probabilities: recompute" in result.stdout


def test_check_knows_a_mixture_of_experts_by_its_architecture(tmp_path: Path) -> None:
    for name, kind in (("moe", MixtralConfig), ("dense", Qwen3Config)):
        build_tokenizer(tmp_path / name, ["What is 3 + 4?"] * 20)
        kind(hidden_size=64, architectures=[kind.__name__.replace("Config", "ForCausalLM")]).save_pretrained(
            tmp_path / name
        )
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {tmp_path}/moe}}\ndata: {{sources: [{{kind: reasoning_gym, task: chain_sum}}]}}\n"
    )
    words = ("check", str(file), "algorithm={name: grpo, routing_replay: engine}")
    result = megarl(*words)
    assert result.returncode == 0, result.stderr
    assert "this one is dense" in megarl(*words, f"model.path={tmp_path}/dense").stderr


def write_large_moe(folder: Path) -> Path:
    """The shape of Qwen3-30B-A3B, without weights, and a run of it on 4 nodes of 8 GPUs."""
    model = folder / "Qwen3-30B-A3B"
    build_tokenizer(model, ["What is 3 + 4?"] * 20, 384)
    shape = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    (model / "config.json").write_text(json.dumps(shape))
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(60)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.yaml"
    file.write_text(
        f"""
model: {{path: {model}, recompute: full}}
launch: {{ranks: 32}}
parallel: {{tensor: 2, context: 2, expert: 8}}
data:
  sources: [{{kind: file, path: {folder / "gsm8k.jsonl"}, preset: gsm8k}}]
  max_prompt_tokens: 2048
rl: {{prompts_per_step: 64}}
sampling: {{max_new_tokens: 30720}}
engine: {{kind: sglang, python: {sys.executable}, tensor_parallel: 4, max_running_requests: 128}}
"""
    )
    return file


def test_check_refuses_the_likeliest_mistakes_about_a_large_model(tmp_path: Path) -> None:
    """In one process: starting one for each would take minutes."""
    file = write_large_moe(tmp_path)
    assert check_run(load_config(file), 32).startswith("gspo on 32 ranks")
    mistakes = {
        "parallel.expert=3": "parallel.expert: 3 does not divide the model's 128 experts",
        "parallel.expert_tensor=5": "parallel.expert_tensor: 5 does not divide the model's 768 rows of an expert",
        "model.transformer.num_layer=47": "Did you mean 'num_layers'",
        "engine.tensor_parallel=3": "engine.tensor_parallel: 3 does not divide the model's 32 attention heads",
        "engine.python=/nowhere": "engine.python: SGLang's environment is missing (/nowhere not found)",
        "sampling.max_new_tokens=40000": "together exceed the model's context of 40960 tokens",
        "data.max_prompt_tokens=1": "source 'gsm8k' has no prompt to train on",
        "data.sources.0.path=/nowhere.jsonl": "/nowhere.jsonl: no such file",
        "data.sources.0.preset=gsm8": "no preset 'gsm8'. Did you mean 'gsm8k'",
        "data.sources.0.verifier=maths": "no verifier is named 'maths'. Did you mean 'math'",
        "data.evaluations.aime={kind: file, path: /nowhere.parquet, preset: aime}": "/nowhere.parquet: no such",
        "rewards.verifiers=[{name: math, options: {mod: lenient}}]": "has no option 'mod'. Did you mean 'mode'",
        "model.tokenizer=/nowhere": "/nowhere: no such folder",
        "model.chat_template=/nowhere.jinja": "/nowhere.jinja: the chat template can't be read",
        "alarms.rules=[{metric: train/entropyy, when: below, threshold: 1}]": "Did you mean 'train/entropy'",
        "rl.group_size=1": "rl.group_size: gspo compares the responses to a prompt",
        "rl.prompts_per_step=63": "rl.prompts_per_step=63 can't be shared out equally to 8",
        "sft={steps: 5, demonstrations: {path: /nowhere.jsonl, preset: messages}}": "/nowhere.jsonl: no such file",
        "sft.steps=5": "sft.demonstrations: a cold start (sft.steps) needs something to learn from",
        "model.path=/nowhere": "model.path: /nowhere: no such folder",
        "model.path=null": "model.path: the folder of a Hugging Face checkpoint must be set",
        "model.load_balancing=bias": "model.load_balancing: bias updates a router's expert bias",
    }
    for word, told in mistakes.items():
        with pytest.raises(UserError) as caught:
            check_run(load_config(file, [word]), 32)
        assert told in str(caught.value), word
    config = tmp_path / "Qwen3-30B-A3B" / "config.json"
    published = config.read_text()
    config.write_text(json.dumps({**json.loads(published), "tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"engine\.kind: sglang cannot .* tie_word_embeddings: True"):
        check_run(load_config(file), 32)
    config.write_text(published.replace("151936", "128"))
    with pytest.raises(UserError, match="the model's embedding only 128 rows"):
        check_run(load_config(file), 32)


def test_check_takes_a_configuration_for_another_machine(tmp_path: Path) -> None:
    """A cluster's, looked at on a laptop: no GPU here, and the servers are elsewhere."""
    file = write_large_moe(tmp_path)
    words = ["platform=cuda", "engine.python=/nowhere", "engine.urls=[http://node7:30000]"]
    assert "32 ranks" in check_run(load_config(file, words), 32)


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
        "data", "inspect", str(ROOT / "tests" / "fixtures" / "datasets" / "gsm8k.jsonl"), "--samples", "1"
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
        (("check", QUICKSTART, "model.path=/nowhere"), "model.path: /nowhere: no such folder"),
        (("check", QUICKSTART, "model.make.hidden_size=3"), "unknown key 'model.make'"),
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
def test_a_mistake_is_one_message_and_exit_code_2(
    words: tuple[str, ...], told: str, quickstart: Path
) -> None:
    result = megarl(*(str(quickstart) if word == QUICKSTART else word for word in words))
    assert result.returncode == 2, result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_variables_left_over_from_another_launch_are_named(quickstart: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    for word, variables, told in (
        ("seed=0", {"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ("seed=0", alone, "launch.ranks=2, but RANK=0 and WORLD_SIZE=1 in the environment"),
        (
            "launch.ranks=null",
            alone,
            "parallel needs 2 ranks, but RANK=0 and WORLD_SIZE=1 in the environment",
        ),
    ):
        result = megarl("train", str(quickstart), word, **variables)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert told in result.stderr
        assert f"`unset {' '.join(variables)}`: megarl then starts its own ranks" in result.stderr


def test_under_torchrun_a_mistake_in_the_file_is_told_by_one_rank() -> None:
    place = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [megarl("train", QUICKSTART, "rl.stps=3", RANK=rank, **place) for rank in ("0", "1")]
    assert [r.returncode for r in ranks] == [2, 2]
    assert "Did you mean 'steps'" in ranks[0].stderr
    assert ranks[1].stderr == ""


def test_a_mistake_is_told_where_variables_of_another_launch_name_a_rank_that_is_alone(
    quickstart: Path,
) -> None:
    left = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for word, told in (
        ("rl.stps=3", "Did you mean 'steps'"),
        ("parallel.context=3", "= 3 ranks do not divide the world size 2"),
        ("sft.batch_size=3", "sft.batch_size=3"),
    ):
        result = megarl("train", str(quickstart), word, **left)
        assert result.returncode == 2, result.stderr
        assert result.stderr.count("\n") == 1
        assert told in result.stderr


def test_every_path_of_the_command_line_may_begin_at_a_home_folder(tmp_path: Path) -> None:
    """No shell reads the ~ of `--option=~/file`."""
    apps = [app, *(group.typer_instance for group in app.registered_groups)]
    hints = [
        hint
        for command in (command for part in apps for command in part.registered_commands)
        for hint in get_type_hints(command.callback, include_extras=True).values()
        if "Path" in str(get_args(hint)[:1])
    ]
    assert len(hints) >= 12
    assert all(get_args(hint)[1].parser is cli.path for hint in hints)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    assert "rows 1" in megarl("data", "inspect", "~/rows.jsonl", HOME=str(tmp_path)).stdout
    missing = megarl("data", "inspect", "rows.jsonl", "--tokenizer=~nobody-is-called-so/x")
    assert missing.returncode == 2
    assert "'--tokenizer'" in missing.stderr


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_a_file_without_a_row_that_can_be_used_is_a_failure(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1\x1b[2J"}\n{}\n')
    result = megarl("data", "inspect", str(path), "--preset", "gsm8k", *words)
    assert result.returncode == 2
    assert result.stdout
    assert "none of its 2 rows can be used. The first: " in result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    path.write_text('{"question": "a", "answer": "#### 1"}\n{}\n')
    assert megarl("data", "inspect", str(path), *words).returncode == 0


def test_a_message_spells_out_what_a_terminal_would_obey(tmp_path: Path) -> None:
    result = megarl("data", "inspect", str(tmp_path / "a\x1b[2J\u202eb"))
    assert r"a\x1b[2J\u202eb: no such file" in result.stderr
    assert not {"\x1b", "\u202e"} & set(result.stderr)
