"""`python supervise.py PARENT_PID COMMAND...`: run a command that must not outlive the process that asked for it.

Standard library only and run by path, so that it starts in milliseconds. It leads a process group of its own, in
which the command and all its children live. Twice a second it looks whether its parent still lives; if not (even
killed with -9), the whole group is killed. A death signal (`PR_SET_PDEATHSIG`) would not do for that, since it comes
when the *thread* that started the child ends; it does for the command, which ends with its supervisor.

SGLang also leaves files in /dev/shm, even after a normal end. They are found while its processes map them
(`segments`), and removed when these have ended: here, when the parent is dead; otherwise by the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Named by SGLang, by Python's semaphores and shared memory, by torch, NCCL and CUDA.
SEGMENT = re.compile(r"(sglang_|sgl_shm_|multi_tokenizer_args_|sem\.mp-|psm_|torch_|nccl-|cuda\.shm\.)[^/ ]+")
INTERVAL = 0.5  # seconds between two looks at the parent
PR_SET_PDEATHSIG = 1


def members(group: int) -> Iterator[int]:
    """Yield the processes of a process group that have not ended: one that has may stay listed, if nobody waits for
    it."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, _, of, *_ = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(of) == group and state not in "ZX":
                    yield int(entry)


def names_of_all() -> frozenset[str]:
    """Return the names of everybody's segments."""
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(SHARED_MEMORY))
    return frozenset()


def segments(group: int, before: Iterable[str]) -> set[str]:
    """Return the names of the shared memory that a process group has made and maps now. before: the names that there
    were when it started, which are others'."""
    mapped: set[str] = set()
    for pid in members(group):
        with contextlib.suppress(OSError):
            maps = Path("/proc", str(pid), "maps").read_text()
            mapped |= {line.partition(f"{SHARED_MEMORY}/")[2] for line in maps.splitlines()}
    return {name for name in mapped - set(before) if SEGMENT.fullmatch(name)}


def remove_segments(names: Iterable[str]) -> None:
    """Remove shared memory of processes that have ended, as far as it is still there and this user's."""
    for name in names:
        path = SHARED_MEMORY / name
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()


def kill_the_rest_of_the_group(before: Iterable[str]) -> None:
    """Kill all processes of this group but this one, and remove the shared memory that they leave."""
    group, left = os.getpgrp(), set[str]()
    for _ in range(1000):  # one may start another meanwhile
        left |= segments(group, before)
        others = [pid for pid in members(group) if pid != os.getpid()]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not others:
            break
        time.sleep(0.01)
    remove_segments(left)


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    before = names_of_all()
    # Ctrl-C and SIGTERM are for the group's parent and for the command: the supervisor ends with its command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc, me = ctypes.CDLL(None), os.getpid()

    def before_the_command() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:  # it died meanwhile
            os._exit(128 + signal.SIGKILL)

    child = subprocess.Popen(command, preexec_fn=before_the_command)
    while child.poll() is None:
        if os.getppid() != parent:
            kill_the_rest_of_the_group(before)
            os.killpg(0, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(INTERVAL)
    os.killpg(0, signal.SIGTERM)  # what the command left behind; the supervisor ignores it
    # 128 + n for a command that signal n ended, as a shell has it.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
