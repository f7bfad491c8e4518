"""The sandbox: what an honest program can rely on, what no program can pass, and what is left when all is over."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.rewards.execution import Limits, Sandbox, SandboxFailure, choose
from megarl.rewards.execution.backends import Bubblewrap, bubblewrap_variants
from megarl.rewards.execution.inside import wire
from megarl.rewards.execution.view import make_view
from tests.rewards.execution.sandboxes import CONFINED, SMALL, nothing_left_behind, sandbox

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(params=CONFINED)
def confined(request) -> Sandbox:
    return sandbox(request.param)


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    with nothing_left_behind(tmp_path):
        yield


def run(sandbox: Sandbox, program: str, stdin: bytes = b"", limits: Limits = SMALL):
    with sandbox.session({"main.py": program.encode()}, limits) as session:
        return session.script(stdin)


# What an honest program can rely on.


def test_a_program_gets_its_input_and_its_output_comes_back_byte_for_byte(confined):
    every_byte = bytes(range(256)) * 40
    got = run(confined, "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", every_byte)
    assert (got.ended, got.code, got.stdout) == ("exit", 0, every_byte)


def test_input_of_several_megabytes_arrives_whole(confined):
    lines = b"12345 67890\n" * 300_000
    got = run(confined, "import sys\nprint(sum(len(line) for line in sys.stdin))", lines)
    assert got.stdout == b"%d\n" % len(lines)


@pytest.mark.parametrize(
    ("program", "ended", "code"),
    [
        ("", "exit", 0),
        ("import sys; sys.exit()", "exit", 0),
        ("import sys; sys.exit(3)", "exit", 3),
        ("raise SystemExit('no')", "exit", 1),
        ("1 / 0", "exit", 1),
        ("def f(:", "exit", 1),
        ("import os; os._exit(7)", "exit", 7),
        ("import os, signal; signal.raise_signal(signal.SIGUSR1)", "signal", signal.SIGUSR1),
    ],
)
def test_a_run_ends_as_the_interpreter_alone_would_end(program, ended, code):
    got = run(sandbox("bubblewrap"), program)
    assert (got.ended, got.code) == (ended, code)


def test_buffers_are_flushed_exit_handlers_run_and_threads_are_awaited():
    program = """
import atexit, threading, time
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main", end=" ")
"""
    assert run(sandbox("bubblewrap"), program).stdout.split() == [b"main", b"thread", b"handler"]


def test_the_usual_ways_to_read_input_all_work():
    for way in (
        "input()",
        "__import__('sys').stdin.readline().strip()",
        "open(0).read()",
        "open('/dev/stdin').read()",
    ):
        assert run(sandbox("bubblewrap"), f"print({way})", b"hello").stdout.strip() == b"hello", way


def test_a_program_is_the_main_module_and_sees_no_trace_of_its_supervisor():
    program = """
import sys
assert __name__ == "__main__" and sys.argv == ["main.py"] and sys.modules["__main__"].__dict__ is globals()
print([name for name in sys.modules if "inside" in name or "supervisor" in name], sys.path[0])
"""
    assert run(sandbox("bubblewrap"), program).stdout == b"[] /megarl/work\n"


def test_processes_threads_and_temporary_files_may_be_used_within_the_limits():
    program = """
import multiprocessing, tempfile, threading
with tempfile.TemporaryFile() as file, multiprocessing.get_context("fork").Pool(2) as pool:
    file.write(b"x")
    threads = [threading.Thread(target=int) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(pool.map(abs, [-1, -2]))
"""
    got = run(sandbox("bubblewrap"), program, limits=Limits())
    assert got.stdout == b"[1, 2]\n", got.stderr


def test_runs_of_a_session_share_no_variables_and_every_run_hashes_alike(confined):
    program = b"import sys\nprint(hash('a'), hasattr(sys, 'mark'))\nsys.mark = 1"
    outputs = []
    for _ in range(2):
        with confined.session({"main.py": program}, SMALL) as session:
            outputs += [session.script(b"").stdout for _ in range(2)]
    assert len(set(outputs)) == 1
    assert outputs[0].endswith(b"False\n")


def test_a_function_is_called_with_json_arguments_and_its_value_comes_back_as_json(confined):
    solution = b"""
class Solution:
    def pick(self, rows: List[int], at=0):
        return [max(rows), at, (1.5, None)]
"""
    with confined.session({"main.py": solution}, SMALL) as session:
        assert session.call("pick", [[3, 9]], {"at": 2}).result == b"[9, 2, [1.5, null]]"
        assert session.call("absent", [], {}).code == 1


def test_convenience_names_for_functions_hide_no_builtin():
    solution = (
        b"def f():\n    return [pow(2, 10, 1000), sqrt(16), len(Counter('aab')), gcd(4, 6), open is not None]"
    )
    with sandbox("bubblewrap").session({"main.py": solution}, SMALL) as session:
        got = session.call("f", [], {})
    assert got.result == b"[24, 4.0, 2, 2, true]", got.stderr


def test_what_a_run_used_is_measured():
    got = run(
        sandbox("bubblewrap"),
        "import time\nx = b'x' * (50 << 20)\nwhile time.process_time() < 0.2: pass\ntime.sleep(0.2)",
    )
    assert 0.15 < got.cpu_seconds < 1.0, got
    assert got.wall_seconds > got.cpu_seconds + 0.15
    assert got.memory_bytes > 50 << 20


def test_only_a_named_interpreter_brings_its_packages():
    numbers = "import numpy\nprint(numpy.arange(3).sum())"
    assert b"No module named 'numpy'" in run(sandbox("bubblewrap"), numbers, limits=Limits()).stderr
    with_packages = choose("bubblewrap", python=sys.executable)
    assert run(with_packages, numbers, limits=Limits()).stdout == b"3\n"


def test_a_linked_environment_is_shown_where_it_is_and_by_its_link(confined, tmp_path):
    link = tmp_path / "linked"
    link.symlink_to(sys.prefix)
    linked = choose(confined.backend.name, python=str(link / "bin" / Path(sys.executable).name))
    assert run(linked, "import numpy\nprint(numpy.arange(3).sum())", limits=Limits()).stdout == b"3\n"


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.parametrize("kind", CONFINED)
def test_a_command_is_built_once_and_again_after_its_sandbox_was_lost(kind):
    source = rb"""
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
int main(void) {
    int a, b;
    scanf("%d %d", &a, &b);
    while (a < 0) memset(mmap(0, 1 << 24, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0), 1, 1 << 24);
    printf("%d\n", a + b);
}
"""
    build = ("gcc", "-o", "main", "main.c")
    with sandbox(kind, programs=True).session({"main.c": source}, SMALL, build=build) as session:
        assert session.build().ok
        assert session.command(["./main"], b"3 4").stdout == b"7\n"
        assert session.command(["./main"], b"-1 4").ended in ("memory", "signal", "wall_time", "lost")
        assert session.command(["./main"], b"5 6").stdout == b"11\n"


# What no program can pass.


def test_the_time_for_one_run_is_bounded_by_processor_and_by_clock(confined):
    limits = Limits(cpu_seconds=1, wall_seconds=30)
    assert run(confined, "while True: pass", limits=limits).ended == "cpu_time"
    limits = Limits(cpu_seconds=30, wall_seconds=0.5)
    assert run(confined, "import time; time.sleep(100)", limits=limits).ended == "wall_time"


def test_memory_that_is_shared_counts_and_the_next_run_gets_a_new_sandbox(confined):
    program = b"""
import mmap, sys, time
if sys.stdin.read() == "big":
    maps = [mmap.mmap(-1, 1 << 25) for _ in range(16)]
    for m in maps:
        m.write(b"x" * (1 << 25))
    time.sleep(100)
print("fine")
"""
    limits = Limits(cpu_seconds=10, wall_seconds=20, memory_bytes=128 << 20)
    with confined.session({"main.py": program}, limits) as session:
        assert session.script(b"big").ended in ("memory", "signal")
        assert session.script(b"small").stdout == b"fine\n"


def test_processes_are_counted_even_where_no_kernel_limit_counts_them(confined):
    program = "import os, time\nfor _ in range(40):\n    if not os.fork(): time.sleep(100)\ntime.sleep(100)"
    limits = Limits(wall_seconds=20, processes=8)
    got = run(confined, program, limits=limits)
    assert got.ended == "processes" or b"BlockingIOError" in got.stderr


@pytest.mark.parametrize("wrong", [{"cpu_seconds": 0}, {"processes": -1}, {"wall_seconds": float("inf")}])
def test_a_limit_that_is_no_limit_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


# Reports come from near a hostile program.


@given(st.binary(max_size=200))
def test_a_forged_report_is_refused_or_read_as_plain_data(data):
    try:
        kind, *_, stdout, stderr, _ = wire.unpack_report(data)
    except ValueError:
        return
    assert 0 <= kind < 256
    assert len(stdout) + len(stderr) <= len(data)


@given(st.binary(max_size=50), st.binary(max_size=50), st.none() | st.binary(max_size=50))
def test_a_report_is_read_as_it_was_written(stdout, stderr, result):
    frame = wire.pack_report(wire.EXIT, -3, 1.5, 0.25, 1 << 40, stdout, stderr, result)
    body = frame[wire.LENGTH.size :]
    assert wire.unpack_report(body) == (wire.EXIT, -3, 1.5, 0.25, 1 << 40, stdout, stderr, result)
    with pytest.raises(ValueError):
        wire.unpack_report(body + b"x")


# Failures that are not the program's.


def test_a_command_that_does_not_exist_is_a_failure_of_the_sandbox(confined):
    with confined.session({}, SMALL) as session, pytest.raises(SandboxFailure, match="no-such-compiler"):
        session.command(["no-such-compiler"], b"")


def test_a_sandbox_killed_from_outside_says_nothing_about_the_program(confined):
    others = set(psutil.Process().children())
    with confined.session({"main.py": b"import time; time.sleep(100)"}, Limits()) as session:

        def kill() -> None:
            below = 1 if confined.backend.name == "landlock" else 2  # processes, once the program runs
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                for child in set(psutil.Process().children()) - others:
                    if len(child.children(recursive=True)) >= below:
                        return child.kill()
                time.sleep(0.01)
            return None

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(SandboxFailure, match="killed from outside"):
            session.script(b"")
        killer.join()


def test_a_sandbox_that_cannot_start_says_why(tmp_path):
    liar = tmp_path / "bwrap"
    liar.write_text("#!/bin/sh\necho bwrap: no permissions to create a namespace >&2\nexit 1\n")
    liar.chmod(0o755)
    broken = Sandbox(Bubblewrap(str(liar), user_namespace=True, proc=True), make_view())
    with pytest.raises(SandboxFailure, match="no permissions to create a namespace"):
        run(broken, "print(1)")


# Nothing is left.


@pytest.mark.parametrize("kind", CONFINED)
def test_when_the_scoring_process_is_killed_its_sandboxes_die_with_it(kind, tmp_path):
    sandbox(kind)
    folder = tmp_path / "megarl-work"
    folder.mkdir()
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from megarl.rewards.execution import choose, Limits\n"
            f"place = choose({kind!r}, cgroups=False)\n"
            "program = {'main.py': b'import time; time.sleep(1000)'}\n"
            "with place.session(program, Limits(wall_seconds=500)) as session:\n"
            "    print('started', flush=True)\n    session.script(b'')\n",
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=REPOSITORY,
    )
    assert owner.stdout is not None
    owner.stdout.readline()
    own = psutil.Process(owner.pid)
    deadline = time.monotonic() + 20
    while len(below := own.children(recursive=True)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(below) >= 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gone, alive = psutil.wait_procs(below, timeout=10)
    assert alive == [], gone
    for process in psutil.Process().children():  # we are their reaper in this test
        os.waitpid(process.pid, os.WNOHANG)
    assert list(folder.iterdir()) == []


HALF_ENDED = """
import ctypes, os, sys, threading, time
from megarl.rewards.execution.inside.supervisor import has_ended
def late():
    while f") Z" not in open(f"/proc/self/task/{os.getpid()}/stat").read():
        time.sleep(0.01)
    told = os.fork() or os._exit(has_ended(os.getppid()))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(told, 0)[1]))
assert not has_ended(os.getppid())
threading.Thread(target=late).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_an_owner_in_the_midst_of_its_end_counts_as_ended():
    """Its children see its number as their parent's until the end is over; here one of its threads holds it up."""
    assert subprocess.run([sys.executable, "-c", HALF_ENDED], cwd=REPOSITORY, timeout=60).returncode == 1


def test_many_sandboxes_at_once_do_not_disturb_each_other(confined):
    def one(number: int) -> bytes:
        with confined.session({"main.py": b"print(int(input()) ** 2)"}, Limits()) as session:
            return session.script(b"%d" % number).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [b"%d\n" % (number**2) for number in range(16)]


# Which sandbox.


def test_every_variant_of_bubblewrap_that_starts_here_confines():
    sandbox("bubblewrap")
    program = """
import os, socket
print(os.path.exists("/etc/passwd"), os.access("/", os.W_OK))
try:
    socket.create_connection(("127.0.0.1", 22), 0.1)
except OSError as error:
    print(type(error).__name__)
"""
    outputs = set()
    for variant in bubblewrap_variants():
        with contextlib.suppress(SandboxFailure):
            outputs.add(run(Sandbox(variant, make_view()), program).stdout)
    assert outputs == {b"False False\nPermissionError\n"}


def test_running_unconfined_is_refused_unless_asked_for_by_name():
    with pytest.raises(UserError, match="unsafe_allow_unsandboxed: true"):
        choose("none")


def test_running_unconfined_when_asked_for_warns(caplog):
    choose.cache_clear()
    with caplog.at_level(logging.WARNING):
        unconfined = choose("none", unsafe_allow_unsandboxed=True)
    assert "NO sandbox" in caplog.text
    assert run(unconfined, "print(1)").stdout == b"1\n"


@pytest.fixture
def no_bubblewrap(monkeypatch) -> Iterator[None]:
    """A machine without bubblewrap, for `choose`."""
    monkeypatch.setenv("PATH", tempfile.gettempdir())
    choose.cache_clear()
    yield
    choose.cache_clear()


def test_without_bubblewrap_its_name_is_refused_with_what_to_install(no_bubblewrap):
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        choose("bubblewrap")


def test_without_bubblewrap_the_fall_back_is_taken_with_a_warning(no_bubblewrap, caplog):
    with caplog.at_level(logging.WARNING):
        fallen_back = sandbox("auto")
    assert fallen_back.backend.name == "landlock"
    assert "using the fall-back landlock" in caplog.text
    assert "apt-get install bubblewrap" in caplog.text


def test_where_nothing_works_the_refusal_names_every_reason(no_bubblewrap, monkeypatch):
    monkeypatch.setattr("megarl.rewards.execution.inside.confine.landlock_abi", lambda: 0)
    with pytest.raises(UserError, match=r"bwrap is not installed.*no Landlock"):
        choose("auto")


@pytest.mark.parametrize("options", [{"python": "no-such-python"}, {"read_only": ("no-such/path",)}])
def test_an_interpreter_or_a_path_that_is_not_there_is_a_users_mistake(options):
    with pytest.raises(UserError, match="no-such"):
        choose("auto", **options)


def test_paths_that_programs_may_read_may_begin_at_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "shown").mkdir()
    assert str(tmp_path / "shown") in make_view(read_only=("~/shown",)).paths
    with pytest.raises(UserError, match="read_only: '~nobody-is-called-so': there is no such home"):
        make_view(read_only=("~nobody-is-called-so",))
