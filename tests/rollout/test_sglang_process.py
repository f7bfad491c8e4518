"""The processes of managed servers, with a stand-in that answers `/ready`: none outlives us, ports are free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from megarl.errors import UserError
from megarl.rollout.sglang.client import Server
from megarl.rollout.sglang.process import ServerDied, ServerProcess, _is_free, every_interface, free_port
from megarl.rollout.sglang.settings import SGLangSettings
from tests.rewards.verifiers.http_server import HOSTS, dead_proxies, has_ipv6

SERVER = """
import http.server, mmap, os, socket, subprocess, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("a line of the log", flush=True)
if arguments.get("--die"):
    sys.exit(int(arguments["--die"]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in arguments["--host"] else socket.AF_INET
server = Server((arguments["--host"], int(arguments["--port"])), Ready)
memory = []
for name in arguments.get("--map", f"sglang_loads_test_{os.getpid()}.shm").split():
    shared = os.open("/dev/shm/" + name, os.O_CREAT | os.O_RDWR)
    os.ftruncate(shared, 4096)
    memory.append(mmap.mmap(shared, 4096))
server.serve_forever()
"""


def a_server(
    tmp_path: Path,
    *arguments: str,
    port: int | None = None,
    timeout: float = 60.0,
    program: str = SERVER,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> ServerProcess:
    """A real process; unless told otherwise it behaves as a server does: a log, a child, an answer to /ready."""
    return ServerProcess(
        [sys.executable, "-c", program, *arguments],
        host=host,
        address=host,
        fixed_port=port,
        log_file=tmp_path / "logs" / "server.log",
        environment=environment or {},
        start_timeout=timeout,
    )


def alive(pids: list[int]) -> list[int]:
    return [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


def wait_for_the_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pids)


def segment_of(group: list[int]) -> Path:
    """The shared memory of `a_server`."""
    return Path(f"/dev/shm/sglang_loads_test_{group[1]}.shm")


def group_of(server: ServerProcess) -> list[int]:
    assert server.pid is not None
    return [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]


def test_stopping_ends_the_server_and_its_children_and_may_be_repeated(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    server.start()
    group = group_of(server)
    assert len(group) == 3
    assert segment_of(group).exists()
    server.stop()
    server.stop()
    assert server.pid is None
    assert not alive(group)
    assert not segment_of(group).exists()


def test_shared_memory_of_others_is_never_removed(tmp_path: Path) -> None:
    """What was there before and what is not named as a segment, though the server maps it; and what the server doesn't
    map, though it came meanwhile."""
    names = [f"{kind}_test_{os.getpid()}" for kind in ("sglang_before", "users_own", "sglang_meanwhile")]
    before, own, meanwhile = paths = [Path("/dev/shm", name) for name in names]
    try:
        before.write_bytes(b"x" * 4096)
        server = a_server(tmp_path, "--map", f"{before.name} {own.name}")
        server.start()
        meanwhile.write_bytes(b"x" * 4096)
        server.stop()
        assert [path.exists() for path in paths] == [True, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_server_that_dies_at_start_shows_its_last_log_lines(tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match=r"(?s)exit code 3 .*a line of the log"):
        a_server(tmp_path, "--die", "3").start()


def test_a_server_that_is_never_ready_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    program = "import time; print('still loading', flush=True); time.sleep(600)"
    server = a_server(tmp_path, program=program, timeout=3.0)
    with pytest.raises(UserError, match=r"(?s)not ready after 3 s.*still loading"):
        server.start()
    assert server.pid is None


def test_a_port_in_use_is_an_error_if_it_was_asked_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=f"port {taken.getsockname()[1]} .* in use"):
            a_server(tmp_path, port=taken.getsockname()[1]).start()


@pytest.mark.parametrize("host", HOSTS)
def test_a_server_is_reached_on_either_loopback_and_past_any_proxy(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_proxies(monkeypatch)
    process = a_server(tmp_path, host=host)
    process.start()
    try:
        server = Server(process.url + "/", None)
        assert server.await_answer_or_death(patience=0)
        with pytest.raises(UserError, match="in use"):
            a_server(tmp_path, host=host, port=process.port).start()
    finally:
        process.stop()


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_a_port_is_not_free_on_all_interfaces_while_one_of_ipv6_has_it() -> None:
    port = free_port("")
    assert _is_free("", port)
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        assert not _is_free("", port)
        assert not _is_free("::", port)
        assert _is_free("127.0.0.1", port)


def test_a_server_listens_where_its_address_leads() -> None:
    leads = {
        "10.0.0.1": "0.0.0.0",
        "fd00::1": "::",
        "::1": "::",
        "localhost": "0.0.0.0",
        "no.such.host.": "0.0.0.0",
    }
    assert {address: every_interface(address) for address in leads} == leads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["localhost:30000"]}, r"urls.*number 0, 'localhost:30000' must begin with http"),
        ({"urls": ["http://a", "http://::1:30000"]}, r"urls.*number 1, .*in brackets"),
        ({"urls": [""]}, r"urls.*number 0, '' must"),
        ({"address": "http://node0"}, "address.*no host"),
        ({"address": "node0:8000"}, "address.*no host"),
        ({"address": ""}, "address.*no host"),
    ],
)
def test_an_address_that_is_none_is_refused_by_its_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        SGLangSettings.model_validate(settings)
    for address in ("node0", "10.0.0.1", "fd00::1", "[fd00::1]", "fe80::1%eth0"):
        SGLangSettings(address=address, urls=(f"http://{'[::1]' if ':' in address else address}:8000",))


def test_a_port_that_is_taken_meanwhile_is_exchanged_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        offers = iter([taken.getsockname()[1], free_port("127.0.0.1")])
        monkeypatch.setattr("megarl.rollout.sglang.process.free_port", lambda host: next(offers))
        server = a_server(tmp_path)
        server.start()
        try:
            assert server.port != taken.getsockname()[1]
        finally:
            server.stop()


def test_a_port_that_was_taken_by_who_has_left_again_is_exchanged_too(tmp_path: Path) -> None:
    """SGLang's own processes may take it, and end with the server."""
    refuses_once = f"""
import pathlib
tried = pathlib.Path({str(tmp_path / "tried")!r})
if not tried.exists():
    tried.touch()
    print("ERROR: [Errno 98] error while attempting to bind: address already in use", *range(30), sep="\\n")
    raise SystemExit(3)
"""
    server = a_server(tmp_path, program=refuses_once + SERVER)
    server.start()
    try:
        assert server.pid is not None
    finally:
        server.stop()


def test_a_launchers_variables_do_not_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = "import os; print(*sorted(os.environ)); raise SystemExit(1)"
    server = a_server(tmp_path, program=program, environment={"EXTRA": "1"})
    with pytest.raises(ServerDied) as died:
        server.start()
    names = str(died.value).split()
    assert {"EXTRA", "OMP_NUM_THREADS"} <= set(names)
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & set(names)


PARENT = """
import sys, time
from pathlib import Path
from megarl.rollout.sglang.process import ServerProcess
server = ServerProcess(
    [sys.executable, "-c", sys.argv[1]],
    host="127.0.0.1", address="127.0.0.1", fixed_port=None,
    log_file=Path(sys.argv[2]), environment={}, start_timeout=60.0,
)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_killing_megarl_leaves_no_orphan(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, SERVER, str(tmp_path / "server.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    leader = int(parent.stdout.readline())
    group = [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
    assert len(alive(group)) == 3
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for_the_end(group)
    assert not segment_of(group).exists()


def test_a_server_ends_with_its_supervisor_and_stopping_ends_the_rest(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    server.start()
    supervisor, command, child = group_of(server)
    os.kill(supervisor, signal.SIGKILL)
    wait_for_the_end([command])
    assert server.pid is None
    server.stop()
    wait_for_the_end([child])
    assert not segment_of([supervisor, command, child]).exists()
