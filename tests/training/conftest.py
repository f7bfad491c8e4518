"""Runs of the real command, on a model so small that a step takes a fraction of a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import ROOT, Fork, environment_of_a_command, start_megarl
from tests.ranks import RankPool

TINY = """
defaults: [{quickstart}]
data: {{heldout: {{count: 16}}}}
sft: {{steps: 4, batch_size: 8, log_every: 2, optimizer: {{lr: 8.0e-4, warmup_steps: 0}}}}
rl: {{steps: 6, prompts_per_step: 4, group_size: 4, minibatches: 2, audit_every: 2, audit_responses: 6,
      optimizer: {{lr: 1.0e-3}}}}
sampling: {{max_new_tokens: 8}}
evaluation: {{every: 3}}
checkpoint: {{every: 3}}
log: {{samples_every: 2}}
"""


@dataclass
class Finished:
    code: int
    output: str


class Command:
    """`megarl ...` in a folder of its own."""

    def __init__(self, folder: Path, quickstart: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny.yaml"
        self.config.write_text(TINY.format(quickstart=quickstart))

    def environment(self) -> dict[str, str]:
        return {
            **environment_of_a_command(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "MASTER_ADDR": "left.over.invalid",  # of no account where no rank is named
            "LOCAL_RANK": "7",
        }

    def start(self, *words: str, program: Sequence[str] = ()) -> subprocess.Popen[str] | Fork:
        """The command in a fork of a process that has imported everything; or this program, as a new process."""
        if not program:
            return start_megarl(*words, folder=self.folder, environment=self.environment(), together=True)
        return subprocess.Popen(
            [*program, *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, timeout: float = 300, program: Sequence[str] = ()) -> Finished:
        process = self.start(*words, program=program)
        try:
            output = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode is not None
        return Finished(process.returncode, output)

    def train(self, name: str, *words: str, timeout: float = 300, program: Sequence[str] = ()) -> Finished:
        return self.run("train", str(self.config), f"name={name}", *words, timeout=timeout, program=program)

    def metrics(self, name: str) -> list[dict[str, float]]:
        """The rows of a run's metrics.jsonl, without timings."""
        rows = []
        for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows.append(
                {k: v for k, v in row.items() if not k.startswith("perf/") and not k.endswith("seconds")}
            )
        return rows


def processes_in(folder: Path) -> list[int]:
    """Processes whose working folder is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def ranks_of(pid: int) -> list[int]:
    """The processes of a run's ranks, in their order, by the process that started them."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def wait_until(condition, seconds: float, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {seconds} s"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory, quickstart: Path) -> Command:
    """One folder (with a space in its name) for all runs of the session."""
    return Command(tmp_path_factory.mktemp("runs of megarl"), quickstart)


@pytest.fixture(scope="module")
def ranks(ranks: RankPool, quickstart: Path) -> RankPool:
    """The pool, once the files are made that its jobs open (`tests.training.jobs.open_tiny`)."""
    return ranks


@pytest.fixture(scope="session")
def straight(command: Command) -> Finished:
    """Six steps in one go, the run `straight`."""
    return command.train("straight")
