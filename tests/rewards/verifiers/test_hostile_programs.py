"""Every program in `tests/fixtures/hostile` gets the verdict its header announces, and leaves the machine as it
was.

A header says what the program `tries`, which `test` it faces, what verdict to `expect`, and (as a regular
expression) the `reason`. Tests: `sum` and `add` ask for 3 + 4; `needle` asks for a random word that is
nowhere but in the expected output; `escape` hands the program what it would need to reach the host, and
expects it to report that nothing worked.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.contract import Response
from megarl.rewards.verifiers.code import code
from tests.rewards.execution.sandboxes import CONFINED, SMALL, nothing_left_behind, sandbox

FOLDER = Path(__file__).parents[2] / "fixtures" / "hostile"
PROGRAMS = sorted(FOLDER.glob("*/*.py"))
DECIDED_OUTSIDE = ("verdict", "time")  # where the way to confine makes no difference: one of them is enough
SECRET = "MEGARL_TEST_SECRET"


@dataclass(frozen=True)
class Header:
    tries: str
    test: str
    expect: str
    reason: str = ""


def header(text: str) -> Header:
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("# ")]
    return Header(**dict(line[2:].split(": ", 1) for line in lines))


@dataclass
class Host:
    """What a program could reach or spoil if it escaped."""

    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.sentinel = self.folder / "sentinel"
        self.sentinel.write_text("untouched")
        self.before = self.sentinel.stat()
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.local, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.local.bind(str(self.folder / "socket"))
        self.abstract.bind(f"\0megarl-{self.secret}")
        self.servers = (self.tcp, self.local, self.abstract)
        for server in self.servers:
            server.listen()
            server.setblocking(False)

    def targets(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "sentinel": str(self.sentinel),
            "port": self.tcp.getsockname()[1],
            "unix": str(self.folder / "socket"),
            "abstract": f"megarl-{self.secret}",
            "secret": self.secret,
        }

    def assert_untouched(self) -> None:
        after = self.sentinel.stat()
        assert self.sentinel.read_text() == "untouched"
        for name in ("st_mode", "st_uid", "st_gid", "st_mtime_ns", "st_nlink"):
            assert getattr(after, name) == getattr(self.before, name)
        for server in self.servers:
            with pytest.raises(BlockingIOError):
                server.accept()

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    (tmp_path / "host").mkdir()
    (tmp_path / "work").mkdir()
    host = Host(tmp_path / "host")
    monkeypatch.setenv(SECRET, host.secret)
    yield host
    host.close()


def ground_truth(test: str, host: Host) -> dict[str, Any]:
    needles = [f"needle-{secrets.token_hex(8)}" for _ in range(2)]
    tests: dict[str, list[dict[str, Any]]] = {
        "sum": [{"stdin": "3 4\n", "stdout": "7\n"}] * 2,
        "add": [{"function": "add", "args": [3, 4], "expected": 7}] * 2,
        "needle": [{"stdin": "where is it?\n", "stdout": needle} for needle in needles],
        "needle_call": [{"function": "find", "args": [], "expected": needle} for needle in needles],
        "escape": [{"stdin": json.dumps(host.targets()), "stdout": "contained"}],
    }
    return {"tests": tests[test]}


CASES = [
    pytest.param(path, kind, id=f"{path.parent.name}-{path.stem}-{kind}")
    for path in PROGRAMS
    for kind in (CONFINED[:1] if path.parent.name in DECIDED_OUTSIDE else CONFINED)
]


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_a_hostile_program_gets_its_verdict_and_leaves_the_machine_as_it_was(path, kind, host, tmp_path):
    sandbox(kind)
    text = path.read_text()
    expected = header(text)
    with nothing_left_behind(tmp_path / "work"):
        score = code(
            Response(f"```python\n{text}\n```"), ground_truth(expected.test, host), limits=SMALL, sandbox=kind
        )
    host.assert_untouched()
    assert score.value == {"pass": 1.0, "fail": 0.0}[expected.expect], score.reason
    assert re.search(expected.reason, score.reason), score.reason


def test_there_are_at_least_seventy_hostile_programs_each_with_a_complete_header():
    headers = [header(path.read_text()) for path in PROGRAMS]
    assert len(headers) >= 70
    assert {header.expect for header in headers} == {"pass", "fail"}
    assert len({header.tries for header in headers}) == len(headers)
