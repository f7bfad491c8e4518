"""The processes below a process, from /proc: who they are, how much memory they hold. Used on both sides."""

from __future__ import annotations

import os
import time

PAGE = os.sysconf("SC_PAGE_SIZE")
SIGKILL, SIGSTOP = 9, 19  # the module `signal` takes longer to import than a sandbox to start


def descendants(pid: int) -> list[int]:
    """Return every process below `pid` (not itself), parents before children; those that vanish are left out."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def resident_bytes(pids: list[int]) -> int:
    """Return the sum of the resident memory in bytes; pages that several of them share are counted once for each."""
    return sum(int((_read(f"/proc/{pid}/statm").split() or "00")[1]) * PAGE for pid in pids)


def threads(pids: list[int]) -> int:
    """Return how many threads they have, at least one each."""
    return sum(max(1, len(_list(f"/proc/{pid}/task"))) for pid in pids)


def scheduled(pids: list[int]) -> dict[int, tuple[float, float]]:
    """Return for each of their threads the seconds that it had a processor, and those in which it could run and the
    machine gave it none, where known."""
    threads = {}
    for pid in pids:
        for thread in _list(f"/proc/{pid}/task"):
            times = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
            if len(times) == 3:
                threads[int(thread)] = (int(times[0]) / 1e9, int(times[1]) / 1e9)
    return threads


def kill_all(root: int, patience: float = 5.0) -> list[int]:
    """SIGKILL everything below `root`, again until nothing is left but zombies of its own children.

    Stopped first, so that no process can fork faster than it is killed. Returns the process ids that outlived
    `patience` seconds (normally none).
    """
    end = time.monotonic() + patience
    stopped: set[int] = set()
    while time.monotonic() < end:
        new = [pid for pid in descendants(root) if pid not in stopped]
        if not new:
            break
        for pid in new:
            send(pid, SIGSTOP)
        stopped.update(new)
    for pid in stopped:
        send(pid, SIGKILL)
    while left := [pid for pid in descendants(root) if not is_zombie(pid)]:
        if time.monotonic() > end:
            return left
        for pid in left:
            send(pid, SIGKILL)
        time.sleep(0.002)
    return []


def is_zombie(pid: int) -> bool:
    """Return whether a process is a zombie or gone."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return not state or state[0] in "ZX"


def send(pid: int, number: int) -> None:
    try:  # noqa: SIM105 (contextlib, too, is a costly import)
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _children(pid: int) -> list[int]:
    """Return the children of every thread of `pid`."""
    threads = _list(f"/proc/{pid}/task")
    return [
        int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()
    ]


def _read(path: str) -> str:
    """Return a file's text, empty for what is gone or forbidden."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
