"""A control group for one sandbox, where this machine lets us make one: it counts memory and processes exactly.

Without one the limits still hold per process (rlimits), and in sum by looking at the sandbox every few
milliseconds; a control group adds the kernel's own sum. It needs a folder in which we may make groups: as root on a
plain machine that is the root of the hierarchy (v1), elsewhere a delegated folder (v2; systemd: `Delegate=yes`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from megarl.rewards.execution.limits import Limits

ROOT = Path("/sys/fs/cgroup")
OWN_PROCESSES = 2  # of the sandbox itself: bubblewrap and the supervisor


@dataclass(frozen=True)
class CgroupParents:
    """Where groups can be made: one folder (v2), or one for memory and one for processes (v1)."""

    version: int
    folders: tuple[Path, ...]

    def make(self, limits: Limits) -> Cgroup:
        """Return a new, empty group with these limits. Raises OSError."""
        name = f"megarl-{os.getpid()}-{secrets.token_hex(4)}"
        group = Cgroup(tuple(folder / name for folder in self.folders))
        memory, pids = group.folders[0], group.folders[-1]
        most = limits.memory_bytes + limits.work_bytes  # the work folder is in memory, too
        if self.version == 2:
            bound, swap, most_swap = "memory.max", "memory.swap.max", 0
        else:
            bound, swap, most_swap = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", most
        try:
            for folder in group.folders:
                folder.mkdir()
            (memory / bound).write_text(str(most))
            with contextlib.suppress(OSError):  # not every kernel counts swap
                (memory / swap).write_text(str(most_swap))
            (pids / "pids.max").write_text(str(limits.processes + OWN_PROCESSES))
        except OSError:
            group.remove()
            raise
        return group


@dataclass(frozen=True)
class Cgroup:
    """One group, as a folder in each hierarchy."""

    folders: tuple[Path, ...]

    def add(self, pids: list[int]) -> None:
        for folder in self.folders:
            for pid in pids:
                (folder / "cgroup.procs").write_text(str(pid))

    def memory_kills(self) -> int:
        """Return how many processes the kernel has killed in here for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                kills = re.search(r"^oom_kill (\d+)", (self.folders[0] / name).read_text(), re.MULTILINE)
                if kills:
                    return int(kills[1])
        return 0

    def remove(self, patience_s: float = 10.0) -> None:
        """Remove it once it is empty; a dying process keeps it for some milliseconds."""
        end = time.monotonic() + patience_s
        for folder in self.folders:
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > end:
                        return
                    time.sleep(0.005)


def find_parents() -> CgroupParents | None:
    """Return where this process may make groups with memory and process limits; None where it may not."""
    for parents in _candidates():
        try:
            parents.make(Limits()).remove()
        except OSError:
            continue
        return parents
    return None


def _candidates() -> list[CgroupParents]:
    """Return our own group and its parent (v2), and our own groups (v1)."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers and (ROOT / "cgroup.controllers").exists():
            own = ROOT / path.strip("/")
            folders = [folder for folder in (own, own.parent) if folder.is_relative_to(ROOT)]
            found += [CgroupParents(2, (folder,)) for folder in folders]
    memory, pids = ROOT / "memory", ROOT / "pids"
    if memory.is_dir() and pids.is_dir():
        found.append(CgroupParents(1, (memory, pids)))
    return found
