"""A run's ranks on one machine: they meet, end together, and their end is told by one exit code and message."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megarl.launcher import start_ranks
from megarl.monitor.signals import StopSignals
from tests.forks import Finished, environment_of_a_command, finish, start
from tests.training.conftest import ranks_of, wait_until

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


def follow() -> None:
    """Fail because the other one is gone, as a collective does."""
    time.sleep(0.5)
    raise RuntimeError("connection closed by peer")


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
        (
            hang,
            be_killed,
            1,
            "megarl: rank 1 was killed by signal 9 (SIGKILL): the kernel's OOM killer sends it when memory runs out "
            "(`dmesg` tells), and so does whoever limits a job's memory\n",
        ),
        (follow, be_killed, 1, "megarl: rank 1 was killed by signal 9 (SIGKILL)"),
        (
            fail,
            hang,
            1,
            "ValueError: a bug\nmegarl: rank 0 ended with exit code 1; its own words are above\n",
        ),
    ],
)
def test_one_exit_code_and_message_say_how_all_ranks_ended(
    first: Callable[[], None], second: Callable[[], None], code: int, told: str, tmp_path: Path
) -> None:
    result = run(tmp_path, two_ranks, first, second)
    assert result.returncode == code, result.stderr
    whole = not told.startswith("ValueError") and first is not follow
    assert result.stderr == told if whole else told in result.stderr
    assert result.stderr.count("megarl: rank") == told.count("megarl: rank")


def end_when_told(seen: str, saves: bool) -> None:
    """Be a rank that trains: told to end, it needs a moment, and ends as the signal says; or never."""
    stop = StopSignals()
    stop.supervised = True
    stop.can_save()
    stop.listen()
    Path(seen, os.environ["RANK"]).touch()
    while not (stop.number and saves):
        time.sleep(0.02)
    time.sleep(0.2)
    Path(seen, f"saved {os.environ['RANK']}").touch()
    sys.exit(128 + stop.number)


def not_yet_trained(seen: str) -> None:
    StopSignals().listen()
    Path(seen, os.environ["RANK"]).touch()
    hang()


def tell(tmp_path: Path, saves: bool, *numbers: int, rank: int | None = None) -> tuple[Finished, set[str]]:
    """Two ranks, and what they leave when this signal comes to the process that started them, or to one of them."""
    arguments = (partial(end_when_told, str(tmp_path), saves), partial(end_when_told, str(tmp_path), saves))
    process = start(two_ranks, *arguments, folder=tmp_path, environment=environment_of_a_command())
    wait_until(
        lambda: {"0", "1"} <= {file.name for file in tmp_path.iterdir()}, 60, "the start of both ranks"
    )
    told = process.pid if rank is None else ranks_of(process.pid)[rank]
    for number in numbers:
        os.kill(told, number)
        time.sleep(1.1 if len(numbers) > 1 else 0)
    return finish(process, 60), {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_passed_on_once_and_the_ranks_end_in_their_own_time(number: int, tmp_path: Path) -> None:
    result, seen = tell(tmp_path, True, number)
    assert result.returncode == 128 + number, result.stderr
    assert seen == {"0", "1", "saved 0", "saved 1"}
    assert result.stderr.count("a second signal ends it at once") == 1


def test_a_signal_that_reaches_one_rank_alone_ends_the_others_too(tmp_path: Path) -> None:
    """In training the ranks agree at the end of a step, and need no signal; before it they do."""
    result, seen = tell(tmp_path, True, signal.SIGTERM, rank=1)
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert seen == {"0", "1", "saved 0", "saved 1"}


def under_nohup(first: Callable[[], None], second: Callable[[], None]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    two_ranks(first, second)


def test_under_nohup_the_end_of_the_terminal_changes_nothing(tmp_path: Path) -> None:
    action = partial(end_when_told, str(tmp_path), True)
    process = start(under_nohup, action, action, folder=tmp_path, environment=environment_of_a_command())
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60, "the start of both ranks")
    for number in (signal.SIGHUP, signal.SIGTERM):
        for pid in (process.pid, *ranks_of(process.pid)):
            os.kill(pid, number)
    assert finish(process, 60).returncode == 128 + signal.SIGTERM


def test_a_second_signal_ends_all_ranks_at_once(tmp_path: Path) -> None:
    result, seen = tell(tmp_path, False, signal.SIGTERM, signal.SIGTERM)
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert result.stderr.endswith("megarl: ended at once by a second signal\n")
    assert seen == {"0", "1"}


def never_ready(seen: str) -> None:
    stop = StopSignals()
    stop.can_save()
    stop.listen()
    if os.fork() == 0:  # a helper of somebody's, which is no part of the run
        os.kill(os.getpid(), signal.SIGTERM)
        Path(seen, "the helper lives").touch()
        os._exit(0)
    os.wait()
    Path(seen, "0").touch()
    hang()


def test_a_run_of_one_rank_ends_at_once_at_the_second_signal(tmp_path: Path) -> None:
    process = start(never_ready, str(tmp_path), folder=tmp_path, environment=environment_of_a_command())
    wait_until(lambda: (tmp_path / "0").exists(), 60, "the start")
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGTERM)  # the same one, sent to the whole group, too
    time.sleep(1.1)
    assert process.returncode is None
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, 60).returncode == -signal.SIGTERM
    assert {file.name for file in tmp_path.iterdir()} == {"0"}


def test_before_training_a_signal_ends_the_ranks_and_says_that_nothing_is_lost(tmp_path: Path) -> None:
    action = partial(not_yet_trained, str(tmp_path))
    process = start(two_ranks, action, action, folder=tmp_path, environment=environment_of_a_command())
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60, "the start of both ranks")
    os.kill(process.pid, signal.SIGTERM)
    result = finish(process, 60)
    assert result.returncode == 128 + signal.SIGTERM
    assert result.stderr == "megarl: stopped by SIGTERM before the first step: there is nothing to save\n"
