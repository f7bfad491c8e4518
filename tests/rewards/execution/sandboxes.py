"""Sandboxes for tests: the ways to confine that this machine has, and a watch on what they leave behind."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.errors import UserError
from megarl.rewards.execution import Limits, Sandbox, choose
from megarl.rewards.execution.choose import Kind

CONFINED: tuple[Kind, ...] = ("bubblewrap", "landlock")
SMALL = Limits(
    cpu_seconds=0.5,
    wall_seconds=1.5,
    memory_bytes=192 << 20,
    processes=16,
    file_bytes=8 << 20,
    work_bytes=24 << 20,
    output_bytes=1 << 20,
)
PR_SET_CHILD_SUBREAPER = 36


def sandbox(kind: Kind, *, programs: bool = False) -> Sandbox:
    """Skips the test where this machine lacks it; on CI, bubblewrap must be there."""
    try:
        return choose(kind, programs=programs)
    except UserError as error:
        if kind == "bubblewrap" and os.environ.get("CI") == "true":
            pytest.fail(f"CI must have bubblewrap: {error}")
        pytest.skip(str(error))


def _running(others: set[psutil.Process]) -> list[psutil.Process]:
    """Our children but the others. The dead who were handed to us, their reaper in these tests, are buried."""
    found = []
    for child in set(psutil.Process().children(recursive=True)) - others:
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found


@contextmanager
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """Afterwards there is no new child process, not even a detached one, no folder, no control group."""
    others = set(psutil.Process().children(recursive=True))  # other rooms' tests keep ranks and servers
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # escaped daemons become our children
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
    deadline = time.monotonic() + 2
    while (children := _running(others)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children == []
    assert [path.name for path in folder.iterdir() if path.name.startswith("megarl-code-")] == []
    walk = os.walk("/sys/fs/cgroup")  # which others' groups may leave meanwhile
    ours = f"megarl-{os.getpid()}-"
    assert [group for _, groups, _ in walk for group in groups if group.startswith(ours)] == []
