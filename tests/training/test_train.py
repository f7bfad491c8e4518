"""`megarl train` from end to end: what a run leaves behind, and that it can be killed at any time."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.load import load_config
from megarl.training.run import lock_folder
from tests.disk import full_disk
from tests.monitor.test_logger import wandb_end
from tests.training.conftest import Command, Finished, processes_in, ranks_of, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def weights(command: Command, name: str) -> dict[str, torch.Tensor]:
    return load_file(command.folder / "runs" / name / "hf" / "model.safetensors")


def test_a_run_ends_with_a_table_and_leaves_what_it_promises(command: Command, straight: Finished) -> None:
    assert straight.code == 0, straight.output
    folder = command.folder / "runs" / "straight"
    assert load_config(folder / "config.yaml").rl.steps == 6
    assert {p.name for p in (folder / "samples").iterdir()} == {f"step_{n:06d}.jsonl" for n in (2, 4, 6)}
    assert {p.name for p in (folder / "checkpoints").iterdir()} >= {"step_000007", "step_000010"}
    for word in ("eval/accuracy", "before", "after", "cold start", "generate", "Hugging Face checkpoint"):
        assert word in straight.output, word
    assert "old log-probabilities  engine: the engine's own, so no recompute pass" in straight.output
    assert "routing replay         off: routers choose anew" in straight.output
    rows = command.metrics("straight")
    assert [row["step"] for row in rows] == [2, 4, 5, 6, 7, 8, 9, 10]
    assert 0 < rows[-1]["mismatch/abs_diff_max"] < 1e-4
    assert rows[-1]["sync/version"] == 6
    assert [row["step"] for row in rows if "audit/k3" in row] == [6, 8, 10]
    assert 0 < rows[-1]["audit/tokens"] <= 6 * 8
    assert rows[-1]["audit/abs_diff_max"] < 1e-4


def test_the_exported_model_scores_the_sampled_tokens_as_the_engine_did(
    command: Command, quickstart: Path, tmp_path: Path
) -> None:
    """The last samples were drawn by the policy before the last update, so a step without learning is compared."""
    elsewhere = tmp_path / "tokenizer"
    shutil.copytree(
        quickstart.parent / "model", elsewhere, ignore=shutil.ignore_patterns("*config*", "*.safetensors")
    )
    shutil.copy(quickstart.parent / "model" / "tokenizer_config.json", elsewhere)
    words = ["rl.steps=1", "rl.optimizer={lr: 1e-20, min_lr: 0}", "log.samples_every=1", "sft.steps=2"]
    result = command.train("frozen", *words, f"model.tokenizer={elsewhere}")
    assert result.code == 0, result.output
    folder = command.folder / "runs" / "frozen"
    assert (folder / "hf" / "generation_config.json").is_file()  # the tokenizer is not the model folder's
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 8  # the main rank's replica: two prompts, four responses each
    for row in rows:
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        start = len(row["prompt_ids"])
        scored = logprobs[start - 1 : -1].gather(1, ids[start:, None]).squeeze(1)
        torch.testing.assert_close(scored, torch.tensor(row["logprobs"]), atol=1e-4, rtol=0)


def test_killed_and_started_again_a_run_is_bit_identical(command: Command, straight: Finished) -> None:
    """kill -9 of one rank at the first RL step, then of the process that started them between the steps 4 and 6; the
    resumed run repeats what was lost, and nothing else. How checkpoints are written makes no difference."""
    behind = "checkpoint.asynchronous=on"
    for seen, rank in (('"step": 5', 1), ('"step": 8', None)):
        process = command.start("train", str(command.config), "name=killed", behind)
        wait_until(lambda: seen in logged(command.folder / "runs" / "killed"), 200, "some steps")  # noqa: B023
        os.kill(process.pid if rank is None else ranks_of(process.pid)[rank], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
        wait_until(lambda: not processes_in(command.folder), 20, "the end of the killed run's ranks")
        if rank is not None:
            assert process.returncode == 1
            assert "megarl: rank 1 was killed by signal 9 (SIGKILL): the kernel's OOM killer" in output
            assert "megarl: rank 0 lost another rank" in output
            assert "Traceback" not in output

    resumed = command.train("killed", behind)
    assert resumed.code == 0, resumed.output
    assert "Resuming from" in resumed.output
    assert command.metrics("killed") == command.metrics("straight")
    expected, got = weights(command, "straight"), weights(command, "killed")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    command: Command, straight: Finished
) -> None:
    folder = command.folder / "runs" / "killed" / "checkpoints"
    newest = sorted(folder.iterdir())[-1]
    shard = next(newest.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-7])
    result = command.train("killed")
    assert result.code == 0, result.output
    assert f"{newest.name} is damaged" in result.output
    assert shard.name in result.output
    assert all(
        torch.equal(a, weights(command, "killed")[name]) for name, a in weights(command, "straight").items()
    )


def test_killed_in_its_cold_start_a_run_begins_again(command: Command, straight: Finished) -> None:
    """Before the first checkpoint there is nothing but a few lines of metrics, the last one cut short."""
    folder = command.folder / "runs" / "early"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"sft/loss": 9.5, "step": 2}\n{"sft/lo')
    result = command.train("early")
    assert result.code == 0, result.output
    assert command.metrics("early") == command.metrics("straight")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("checkpoint.resume=false", "metrics.jsonl already holds the metrics of a run"),
        ("checkpoint.resume=false log.sinks=[console]", "metrics.jsonl already holds the metrics of a run"),
        ("sft.steps=2", "step_000010: saved after a cold start of 4 steps, the config says sft.steps=2"),
    ],
)
def test_a_run_that_cannot_go_on_as_told_stays_as_it_is(
    word: str, told: str, command: Command, straight: Finished
) -> None:
    folder = command.folder / "runs" / "again"
    if not folder.exists():
        shutil.copytree(command.folder / "runs" / "straight", folder)
    before = {p: p.read_bytes() for p in (folder / "config.yaml", folder / "metrics.jsonl")}
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    result = command.train("again", *word.split())
    assert result.code == 2, result.output
    assert result.output.count("megarl: error") == 1
    assert told in result.output
    assert "Traceback" not in result.output
    assert before == {p: p.read_bytes() for p in before}
    assert names == sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_a_disk_that_is_full_from_the_start_is_told_once(command: Command) -> None:
    with full_disk(30_000):
        result = command.train("no-room", "sft.steps=1", "rl.steps=0")
    assert result.code == 2, result.output
    assert result.output.count("megarl: error") == 1
    assert "no-room/hf: cannot be written (File too large)" in result.output
    assert "Traceback" not in result.output


def test_two_runs_in_one_folder_keep_out_of_each_others_way(command: Command) -> None:
    folder = command.folder / "runs" / "claimed"
    folder.mkdir(parents=True)
    with lock_folder(folder):
        result = command.train("claimed", "rl.steps=0", "sft.steps=1")
    assert result.code == 2, result.output
    assert "runs/claimed: another run is at work in this folder" in result.output
    assert not (folder / "metrics.jsonl").exists()


def test_samples_that_cannot_be_written_are_told_once(command: Command) -> None:
    folder = command.folder / "runs" / "unwritable"
    folder.mkdir(parents=True)
    (folder / "samples").touch()
    result = command.train("unwritable", "log.samples_every=1", "sft.steps=1")
    assert result.code == 2, result.output
    assert result.output.count("megarl: error") == 1
    assert "samples/step_000001.jsonl: cannot be written" in result.output
    assert "Traceback" not in result.output


def test_a_run_that_is_told_to_end_loses_no_step(command: Command, straight: Finished) -> None:
    """In its cold start by the process that started it, then in RL by one rank alone: what is done is saved, and the
    run goes on bit for bit. W&B is told how a start ended."""
    words = ("train", str(command.config), "name=told", "checkpoint.every=0")
    folder, told = command.folder / "runs" / "told", []
    for number, rank, seen in ((signal.SIGINT, None, '"step": 2'), (signal.SIGTERM, 1, '"step": 6')):
        sinks = (
            "log.sinks=[jsonl,wandb]" if rank is None else "log.sinks=[jsonl]"
        )  # W&B takes seconds to start
        process = command.start(*words, sinks)
        wait_until(lambda: seen in logged(folder), 200, "some steps")  # noqa: B023
        os.kill(process.pid if rank is None else ranks_of(process.pid)[rank], number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 128 + number, output
        assert "Traceback" not in output
        (line,) = [line for line in output.splitlines() if "megarl: stopped by" in line]
        step = int(line.split(" after step ")[1].split()[0])
        assert line == (
            f"megarl: stopped by {number.name} after step {step} of 10: its checkpoint is saved, and the same command "
            "goes on from it"
        )
        assert (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()
        assert max([0, *(row["step"] for row in command.metrics("told"))]) <= step
        wait_until(lambda: not processes_in(command.folder), 20, "the end of all its processes")
        told.append((number, step))
    resumed = command.run(*words)
    assert resumed.code == 0, resumed.output
    assert f"step_{told[1][1]:06d}" in resumed.output
    assert command.metrics("told") == command.metrics("straight")
    assert all(
        torch.equal(a, weights(command, "told")[name]) for name, a in weights(command, "straight").items()
    )
    ends = [wandb_end(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
    assert ends == [(128 + signal.SIGINT, True)]


def logged(folder: Path) -> str:
    file = folder / "metrics.jsonl"
    return file.read_text() if file.exists() else ""


def test_a_run_of_one_rank_outlives_the_shell_that_started_it(command: Command) -> None:
    file = command.folder / "runs" / "alone" / "metrics.jsonl"
    words = f"'{command.config}' name=alone launch.ranks=1 parallel.expert=1 sft.steps=60 rl.steps=0"
    shell = f"'{sys.executable}' -m megarl train {words} &\nwhile [ ! -s '{file}' ]; do sleep 0.1; done"
    subprocess.run(
        ["bash", "-c", shell], cwd=command.folder, env=command.environment(), timeout=240, check=True
    )
    wait_until((command.folder / "runs" / "alone" / "hf" / "model.safetensors").exists, 240, "the run")


def test_what_was_passed_over_is_not_kept_in_the_place_of_what_was_written(
    command: Command, straight: Finished
) -> None:
    folder = (
        shutil.copytree(command.folder / "runs" / "straight", command.folder / "runs" / "over")
        / "checkpoints"
    )
    (folder / "step_000010" / "common.pt").unlink()
    result = command.train("over", "rl.steps=5", "checkpoint.keep=1")
    assert result.code == 0, result.output
    assert "step_000010 is damaged" in result.output
    kept = {path.name for path in folder.iterdir()}
    assert "step_000009" in kept
    assert "step_000010" not in kept


def test_torchrun_gives_the_same_run_also_when_it_is_told_to_end(
    command: Command, straight: Finished
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ("train", str(command.config), "name=torchrun")
    process = command.start(*words, program=[*torchrun, "-m", "megarl"])
    wait_until(lambda: '"step": 4' in logged(command.folder / "runs" / "torchrun"), 200, "the cold start")
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert "megarl: stopped by SIGTERM after step" in output
    result = command.run(*words)
    assert result.code == 0, result.output
    assert "Resuming from" in result.output
    assert command.metrics("torchrun") == command.metrics("straight")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel.expert=3"], "do not divide the world size 2"),
        (["model.path=/nowhere"], "model.path: /nowhere: no such folder"),
        (["sampling.max_new_tokens=500"], "no room for a prompt in the model's context of 256"),
        (["sampling.max_new_tokens=250"], "longer than max_prompt_tokens=6"),
        (["evaluation.max_new_tokens=500"], "evaluation.max_new_tokens=500 leaves no room"),
        (["rl.prompts_per_step=3"], "rl.prompts_per_step=3 can't be shared out equally to 2"),
        (["data.max_prompt_tokens=255"], "together exceed the model's context of 256"),
        (["data.sources=[{kind: file, path: empty.jsonl}]"], "empty.jsonl"),
        (["rl.optimizer.lr=1e-6"], "min_lr 1e-05 is above lr 1e-06"),
        (["alarms.rules=[{metric: train/speed, when: above, threshold: 1}]"], "train/speed"),
        (["sft.demonstrations=null"], "sft.demonstrations: a cold start (sft.steps) needs something"),
        (["algorithm=gpso"], "Did you mean 'gspo'"),
        (["folder=/proc/megarl"], "/proc/megarl: the run folder cannot be written"),
        (["engine={kind: sglang, python: /nowhere/python}"], "launch/install_sglang.sh"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_ends_a_run_at_its_start_with_one_message(
    command: Command, words: list[str], told: str
) -> None:
    (command.folder / "empty.jsonl").touch()
    alone = (
        []
        if words[0].startswith(("parallel", "folder", "rl.prompts"))
        else ["launch.ranks=1", "parallel.expert=1"]
    )
    result = command.train("mistaken", *words, *alone)
    assert result.code == 2, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("megarl: error")]
    assert len(lines) == 1, result.output
    assert told in lines[0]
    assert "Traceback" not in result.output
    wait_until(lambda: not processes_in(command.folder), 20, "the end of all its processes")


@pytest.mark.sglang
def test_a_port_in_use_is_told(command: Command) -> None:
    from tests.rollout.engines import find_sglang

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command.train("mistaken", f"engine={{kind: sglang, port: {port}, python: {find_sglang()}}}")
    assert result.code == 2, result.output
    assert f"port {port} on 127.0.0.1 is in use" in result.output
    assert "Traceback" not in result.output
    wait_until(lambda: not processes_in(command.folder), 20, "the end of all its processes")


@pytest.mark.sglang
def test_a_server_that_dies_at_its_start_has_its_last_words_shown(command: Command) -> None:
    from tests.rollout.engines import find_sglang

    engine = f"engine={{kind: sglang, args: {{load-format: nonsense}}, python: {find_sglang()}}}"
    result = command.train("mistaken", engine)
    assert result.code == 2, result.output
    assert result.output.count("megarl: error: SGLang server") == 1
    assert "sglang.log" in result.output
    assert "invalid choice: 'nonsense'" in result.output
    assert "Traceback" not in result.output
    wait_until(lambda: not processes_in(command.folder), 20, "the end of all its processes")


def test_an_alarm_can_stop_a_run(command: Command) -> None:
    rule = "{metric: rollout/tokens, when: above, threshold: 1, action: stop, advice: Talk less.}"
    result = command.train("alarmed", f"alarms.rules=[{rule}]", "sft.steps=2")
    assert result.code == 2, result.output
    errors = [line for line in result.output.splitlines() if line.startswith("megarl: error")]
    assert len(errors) == 1
    assert "step 3: rollout/tokens" in errors[0]
    assert errors[0].endswith("Talk less.")
    assert len(command.metrics("alarmed")) == 2  # the step is on record
    wait_until(lambda: not processes_in(command.folder), 20, "the end of all its processes")


def test_dynamic_sampling_drops_groups_of_one_reward_and_counts_them(command: Command) -> None:
    """An untrained policy solves nothing: every group is dropped, in every round, and no step is taken."""
    result = command.train(
        "dynamic",
        "algorithm={name: gspo, dynamic_sampling: true}",
        "rl.steps=1",
        "rl.sampling_rounds=3",
        "sft.steps=1",
    )
    assert result.code == 0, result.output
    row = command.metrics("dynamic")[-1]
    assert row["rollout/groups"] == 3 * 4
    assert row["rollout/groups_dropped/same_reward"] == row["rollout/groups"]
    assert row["rollout/groups_kept"] == 0
    assert row["train/optimizer_steps"] == 0


def test_prompts_that_come_twice_in_a_step_keep_their_own_routes(command: Command, tmp_path: Path) -> None:
    """Eight groups of two prompts, on two replicas; three optimizer steps that replay the engine's routes."""
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"question": "1 + 1 =", "answer": "2"}\n{"question": "1 + 2 =", "answer": "3"}\n')
    result = command.train(
        "twice",
        f"data.sources=[{{kind: file, path: {prompts}, columns: {{question: question, answer: answer}},"
        " verifier: math}]",
        "data.heldout={count: 0}",
        "rewards.verifiers=[{name: math}]",
        "algorithm={name: grpo, kl: none, old_logprobs: recompute, routing_replay: engine}",
        "sft.steps=0",
        "rl.steps=1",
        "rl.prompts_per_step=8",
        "rl.minibatches=3",
        "log.samples_every=1",
    )
    assert result.code == 0, result.output
    row = command.metrics("twice")[-1]
    assert row["routing/flip_share_first"] < 0.01  # the engine's experts are the trainer's, in float32
    assert 0 < row["routing/entropy"] <= math.log(8)
    lines = (command.folder / "runs/twice/samples/step_000001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len({s["sample_id"] for s in samples}) == len(samples) == 16
    assert len({s["prompt_id"] for s in samples}) == 2


def test_demonstrations_from_a_file_a_template_and_the_datas_counts(command: Command, tmp_path: Path) -> None:
    """Learned from the file, by the template given, which writes the moment at which the run began; what became of the
    data is told before the first step."""
    demonstrations = tmp_path / "demonstrations.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "response": f"Answer: {n + 1}"} for n in range(12)]
    demonstrations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ strftime_now('%f') }}{% for m in messages %}{{ m.role }}{{ mark }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant{{ mark }}{% endif %}"
    )
    words = (
        f"sft.demonstrations={{path: {demonstrations}, preset: prompt_response}}",
        f"model.chat_template={template}",
        "model.template_options={mark: '::'}",
        "rl.steps=1",
        "log.samples_every=1",
    )
    result = command.train("from-file", *words)
    assert result.code == 0, result.output
    assert f"from {demonstrations} (12 rows, 12 train)" in result.output
    assert "chain_sum: endless; 16 held_out" in result.output
    run = command.folder / "runs" / "from-file"

    def prompts(step: int) -> list[str]:
        lines = (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    (began,) = {prompt.partition("user::")[0] for prompt in prompts(1)}
    assert began.isdecimal()
    assert all(prompt.endswith("assistant::") for prompt in prompts(1))
    assert (run / "hf" / "chat_template.jinja").read_text() == template.read_text()
    demonstrations.write_text('{"prompt": "a"}\n')
    refused = command.train("from-a-bad-file", *words)
    assert refused.code == 2
    assert f"{demonstrations}, row 1: no column 'response'" in refused.output
    moved = template.rename(tmp_path / "moved.jinja")
    resumed = command.train("from-file", *words, "rl.steps=2", f"model.chat_template={moved}")
    assert resumed.code == 0, resumed.output  # past the cold start, its demonstrations are not read
    assert {prompt.partition("user::")[0] for prompt in prompts(2)} == {began}


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted")
def test_a_full_disk_costs_nothing_that_was_saved(command: Command, straight: Finished) -> None:
    """The first checkpoint fits, the later ones don't; with more room the same command goes on."""
    folder = command.folder / "runs" / "full" / "checkpoints"
    folder.mkdir(parents=True)
    one = sum(p.stat().st_size for p in (command.folder / "runs/straight/checkpoints/step_000010").iterdir())
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={one * 3 // 2}", "tmpfs", folder]).returncode:
        pytest.skip("this root may not mount")
    try:
        result = command.train("full")
        assert result.code == 2, result.output
        assert "warning" in result.output
        assert "No space left on device" in result.output
        assert [p.name for p in folder.iterdir()] == ["step_000004"]
        assert "Traceback" not in result.output
        subprocess.run(["mount", "-o", f"remount,size={one * 10}", folder], check=True)
        result = command.train("full")
        assert result.code == 0, result.output
        assert "step_000004" in result.output
        assert command.metrics("full") == command.metrics("straight")
    finally:
        subprocess.run(["umount", folder], check=True)


def test_an_unsupported_architecture_is_refused_by_name(
    command: Command, straight: Finished, tmp_path: Path
) -> None:
    shutil.copytree(command.folder / "runs" / "straight" / "hf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**config, "architectures": ["MambaForCausalLM"]})
    )
    result = command.train("mistaken", f"model.path={tmp_path}/model")
    assert result.code == 2
    assert "architecture MambaForCausalLM is not supported" in result.output


@pytest.mark.sglang
def test_the_same_job_runs_with_a_real_sglang_server(command: Command) -> None:
    from tests.rollout.engines import find_sglang

    result = command.train(
        "sglang", "engine.kind=sglang", f"engine.python={find_sglang()}", "rl.steps=2", timeout=400
    )
    assert result.code == 0, result.output
    last = command.metrics("sglang")[-1]
    assert last["sync/version"] == 2
    assert last["mismatch/abs_diff_max"] < 1e-3
    wait_until(lambda: not processes_in(command.folder), 20, "the end of the server")
