"""A run's ranks on one machine: they meet, end together, and their end is told by one exit code and message."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.launcher import start_ranks
from tests.forks import Finished, environment_of_a_command, finish, start

pytestmark = pytest.mark.distributed

MEET = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
who = {"sum": int(total), "threads": torch.get_num_threads(), "variable": os.environ["OMP_NUM_THREADS"]}
Path(os.environ["SEEN"], os.environ["LOCAL_RANK"]).write_text(json.dumps(who))
dist.destroy_process_group()
"""


def meeting(forked: bool) -> None:
    """Three ranks of MEET."""
    if (code := start_ranks(3, 2, [], fork=forked)) is not None:
        sys.exit(code)
    exec(MEET, {})


def two_ranks(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Each of the two does as told."""
    code = start_ranks(2, 1, [])
    if code is None:
        (first, second)[int(os.environ["RANK"])]()
    sys.exit(code)


def be_silent() -> None:
    sys.exit(2)


def tell_later() -> None:
    time.sleep(0.5)
    print("megarl: error: here is why", file=sys.stderr)
    sys.exit(2)


def fail() -> None:
    raise ValueError("a bug")


def hang() -> None:
    time.sleep(10_000)


def be_killed() -> None:
    os.kill(os.getpid(), 9)


def end_well() -> None:
    pass


def run(folder: Path, function: Callable[..., None], *arguments: object, **variables: str) -> Finished:
    environment = environment_of_a_command() | variables
    return finish(start(function, *arguments, folder=folder, environment=environment))


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "fresh interpreters"])
def test_ranks_meet_and_have_the_threads_asked_for(forked: bool, tmp_path: Path) -> None:
    (tmp_path / "megarl").mkdir()
    (tmp_path / "megarl" / "__main__.py").write_text(MEET)
    (tmp_path / "seen").mkdir()
    result = run(tmp_path, meeting, forked, SEEN=str(tmp_path / "seen"), PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    reports = {file.name: json.loads(file.read_text()) for file in (tmp_path / "seen").iterdir()}
    assert reports == {rank: {"sum": 3, "threads": 2, "variable": "2"} for rank in "012"}


@pytest.mark.parametrize(
    ("first", "second", "code", "told"),
    [
        (end_well, end_well, 0, ""),
        (be_silent, tell_later, 2, "megarl: error: here is why\n"),
        (hang, tell_later, 2, "megarl: error: here is why\n"),
        (hang, be_killed, 1, "megarl: rank 1 was killed by signal 9 (SIGKILL)\n"),
        (fail, hang, 1, "ValueError: a bug"),
    ],
)
def test_one_exit_code_and_message_say_how_all_ranks_ended(
    first: Callable[[], None], second: Callable[[], None], code: int, told: str, tmp_path: Path
) -> None:
    result = run(tmp_path, two_ranks, first, second)
    assert result.returncode == code, result.stderr
    assert result.stderr == told or (told.startswith("ValueError") and told in result.stderr)
