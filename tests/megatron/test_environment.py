"""Whether a process is one of several ranks, and that ranks which do not meet say so and end."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest

from megarl.errors import UserError
from megarl.megatron.environment import NAMES, Place, another_rank_tells, forget_place, read_place
from megarl.megatron.meeting import RanksMissing, meet

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*NAMES, "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def give(given: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        given.setenv(name, value)


@pytest.mark.parametrize(
    "variables",
    [{}, {"MASTER_ADDR": "node0"}, {"MASTER_PORT": "1", "LOCAL_RANK": "3"}, {"RANK": "", "WORLD_SIZE": ""}],
)
def test_without_a_rank_and_a_world_size_a_process_is_no_rank(
    variables: dict[str, str], given: pytest.MonkeyPatch
) -> None:
    give(given, variables)
    assert read_place() is None


def test_what_torchrun_and_what_a_script_of_ones_own_sets_is_understood(given: pytest.MonkeyPatch) -> None:
    give(given, TORCHRUN)
    assert read_place() == Place(1, 2, "node0", 29500, agent=False, attempt=0)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        given.delenv(name)
    assert read_place() == Place(1, 2, "node0", 29500, agent=False, attempt=0)
    give(given, {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"})
    assert read_place() == Place(1, 2, "node0", 29500, agent=True, attempt=3)
    give(given, {"MASTER_ADDR": "[fd00::1]"})
    assert read_place() == Place(1, 2, "fd00::1", 29500, agent=True, attempt=3)
    forget_place()
    assert read_place() is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": ""}, "WORLD_SIZE=2 without RANK"),
        ({"WORLD_SIZE": ""}, "RANK=1 without WORLD_SIZE"),
        ({"MASTER_ADDR": ""}, "without MASTER_ADDR"),
        ({"MASTER_PORT": ""}, "without MASTER_PORT"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2: of 2 ranks the last is 1"),
        ({"RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({"RANK": "one"}, "RANK=one is not a whole number"),
        ({"RANK": "1.0"}, "RANK=1.0 is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a whole number from 1 on"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 and WORLD_SIZE=2"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT=x is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT=tcp://10.0.0.1:80 is not a whole number"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_what_to_unset(
    changed: dict[str, str], says: str, given: pytest.MonkeyPatch
) -> None:
    give(given, TORCHRUN | changed)
    with pytest.raises(UserError) as refused:
        read_place()
    assert says in str(refused.value)
    kept = [name for name in (*NAMES, "TORCHELASTIC_RESTART_COUNT") if (TORCHRUN | changed).get(name)]
    assert f"`unset {' '.join(kept)}`" in str(refused.value)


def test_a_mistake_in_the_file_is_told_by_whoever_may_be_alone(given: pytest.MonkeyPatch) -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for variables, silent in (
        (TORCHRUN, False),  # another program's, perhaps
        (agent, True),
        ({"RANK": "2"}, False),
        ({"RANK": "one"}, False),
    ):
        give(given, variables)
        assert another_rank_tells() is silent


def place(rank: int, port: int) -> Place:
    return Place(rank, 2, "localhost", port, agent=False, attempt=0)


def meet_soon(at: Place) -> str:
    """What is told of ranks that do not meet in a moment."""
    with pytest.raises(RanksMissing) as missing:
        meet(at, seconds=0.3, timeout=timedelta(seconds=5))
    return str(missing.value)


def test_ranks_that_do_not_meet_are_named(given: pytest.MonkeyPatch) -> None:
    give(given, TORCHRUN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert "what listens there is not the ranks' store" in meet_soon(place(1, port))
        assert "rank 0 cannot listen there" in meet_soon(place(0, port))
    assert "nothing answers there (Connection refused)" in meet_soon(place(1, port))
    told = meet_soon(place(0, port))
    assert f"rank 0 of 2 at MASTER_ADDR=localhost MASTER_PORT={port}: rank 1 did not come" in told
    assert "`unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT`" in told
    nowhere = Place(1, 2, "nowhere.invalid", port, agent=False, attempt=0)
    assert "nothing answers there (" in meet_soon(nowhere)


def test_ranks_that_come_one_after_the_other_meet_and_a_second_of_a_number_does_not(
    given: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    stores = {}

    def come(rank: int) -> None:
        stores[rank] = meet(place(rank, port), seconds=20, timeout=timedelta(seconds=5))

    later = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0)]
    for thread in later:
        thread.start()
    for thread in later:
        thread.join(30)
    stores[0].set("word", "said")
    assert stores[1].get("word") == b"said"
    assert "another process is rank 1, too" in meet_soon(place(1, port))
