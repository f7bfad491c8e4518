"""No run of a program meets what another one left, and none pays for the machine's other work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.rewards.contract import Response
from megarl.rewards.execution import Limits
from megarl.rewards.verifiers.code import code
from tests.rewards.execution.sandboxes import CONFINED, SMALL, nothing_left_behind, sandbox


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    with nothing_left_behind(tmp_path):
        yield


OBEYS = "import os, sys\nexec(sys.stdin.read())"
LOOKS = """
here = sorted(os.listdir("."))
try:
    shared = os.listdir("/dev/shm")
except OSError:
    shared = []
print(here, shared, open("main.py").read(), os.getcwd() == os.environ['HOME'], "X" in os.environ, os.stat(".").st_mode)
"""
LEAVES = {
    "a file and a folder": "open('x', 'x'); os.makedirs('d/e'); open('d/e/f', 'x')",
    "a module that hides another": "open('json.py', 'x').write('1 / 0')",
    "names that are no text": "open(b'\\xff\\n', 'x'); os.makedirs(b'-rf/\\xfe/ '); open('0', 'x')",
    "a read-only folder": "os.mkdir('d'); open('d/f', 'x'); os.chmod('d/f', 0); os.chmod('d', 0o500)",
    "folders nobody may look into": "os.makedirs('d/e'); open('d/e/f', 'x'); os.chmod('d/e', 0); os.chmod('d', 0o300)",
    "a deep folder": "for _ in range(1100): os.mkdir('d'); os.chdir('d')",
    "links": "os.symlink('/', 'root'); os.symlink('main.py', 'l'); os.link('main.py', 'h'); os.symlink('l', 'd')",
    "a link for the program": "os.unlink('main.py'); os.symlink('/etc/passwd', 'main.py')",
    "a folder for the program": "os.unlink('main.py'); os.mkdir('main.py'); open('main.py/f', 'x')",
    "a spoilt program": "open('main.py', 'w').write('1 / 0')",
    "another of the same size": "text = open('main.py').read(); open('main.py', 'w').write(text[::-1])",
    "a program moved away": "os.rename('main.py', 'other.py')",
    "a pipe": "os.mkfifo('p')",
    "a closed work folder": "os.chmod('.', 0)",
    "another place": "os.environ['X'] = '1'; os.mkdir('d'); os.chdir('d')",
    "shared memory": "open('/dev/shm/x', 'x'); os.mkdir('/dev/shm/d')",
    "a temporary file": "open('/tmp/x', 'x')",
    "many files": "for n in range(2000): open(str(n), 'x')",
    "a process that goes on": """
if not os.fork():
    os.setsid()
    while True:
        for n in range(9):
            open('f%d' % n, 'w')
""",
}


@pytest.mark.parametrize("kind", CONFINED)
def test_each_run_finds_the_folder_as_the_first_one_did(kind):
    with sandbox(kind).session({"main.py": OBEYS.encode()}, SMALL) as session:
        first = session.script(LOOKS.encode())
        assert first.stdout.startswith(b"['main.py'] [] ")
        for name, leaves in LEAVES.items():
            session.script(leaves.encode())
            assert session.script(LOOKS.encode()).stdout == first.stdout, name


@pytest.mark.parametrize("kind", CONFINED)
def test_what_was_built_stays_and_is_built_once(kind):
    make = "mkdir -p d/e; echo built >> d/e/log; ln -s e/log d/l; cp /bin/cat d/cat; chmod 500 d/cat d/e; echo 1 > log"
    spoil = "chmod 700 d/e; rm -rf d log; mkdir log; echo spoilt > main; echo no > d"
    look = "d/cat d/l log; ls -R; touch d/e/x 2>/dev/null || echo closed"
    with sandbox(kind, programs=True).session({"main": b"7"}, SMALL, build=("sh", "-c", make)) as session:
        assert session.build().ok
        first = session.command(("sh", "-c", look), b"")
        assert first.stdout.splitlines()[:2] == [b"built", b"1"]
        assert first.stdout.endswith(b"closed\n")
        session.command(("sh", "-c", spoil), b"")
        assert session.command(("sh", "-c", look), b"").stdout == first.stdout


def test_a_test_is_no_harder_for_what_the_one_before_it_left():
    sandbox("bubblewrap")
    program = "n = int(input())\nopen('notes', 'x').write(str(n))\nprint(n)"
    tests = {"tests": [{"stdin": f"{n}\n", "stdout": f"{n}\n"} for n in range(3)]}
    assert code(Response(f"```python\n{program}\n```"), tests, limits=SMALL, sandbox="bubblewrap").value == 1
    function = "def f(n):\n    open('notes', 'x').write(str(n))\n    return n"
    calls = {"tests": [{"args": [n], "expected": n} for n in range(3)], "function": "f"}
    assert code(Response(f"```python\n{function}\n```"), calls, limits=SMALL, sandbox="bubblewrap").value == 1


@contextmanager
def crowded(others: int) -> Iterator[None]:
    """One processor for this process's new children and so many that never rest."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    crowd = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(others)]
    try:
        yield
    finally:
        for process in crowd:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("kind", CONFINED)
def test_time_without_a_processor_does_not_count_against_the_clock(kind):
    works = b"import time\nwhile time.process_time() < 0.15: pass\nprint('done')"
    limits = Limits(cpu_seconds=5, wall_seconds=0.3)
    with crowded(4), sandbox(kind).session({"main.py": works}, limits) as session:
        run = session.script(b"")
        assert (run.ended, run.stdout) == ("exit", b"done\n")
        assert run.wall_seconds > limits.wall_seconds, "the machine was not crowded"
        assert session.script(b"", within=0.3).ended == "wall_time", "but for the time for all tests together"


@pytest.mark.parametrize("kind", CONFINED)
def test_on_a_crowded_machine_a_sleeper_still_ends_at_its_limit(kind):
    limits = Limits(cpu_seconds=5, wall_seconds=0.3)
    with crowded(2), sandbox(kind).session({"main.py": b"import time\ntime.sleep(60)"}, limits) as session:
        assert session.script(b"").ended == "wall_time"
