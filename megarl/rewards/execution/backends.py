"""The ways to confine a program: bubblewrap, Landlock, and (only when told so) none.

| | bubblewrap | landlock | none |
|---|---|---|---|
| files | a new, read-only root; the rest does not exist | the host's, closed but for the view | open |
| processes | a namespace of its own: nothing outlives it | killed by tree | killed by tree |
| network | a namespace without any | no sockets (seccomp) | open |
| work folder | tmpfs of bounded size | a folder of the host, each file bounded | the same |
| needs | bubblewrap, user namespaces or CAP_SYS_ADMIN | Linux 5.13 with Landlock | nothing |

All of them: limits (rlimits and a watch on the sum), no privileges, a session of its own, a clean environment.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.rewards.execution import seccomp
from megarl.rewards.execution.inside import confine, supervisor
from megarl.rewards.execution.limits import Limits, SandboxFailure
from megarl.rewards.execution.view import View

PACKAGE = Path(__file__).parent  # holds the package `inside`
# Naming the module through our own import of it has its compiled form cached before a sandbox looks for it.
BOOT = (
    f"import sys; sys.path[0] = {{path!r}}; from inside import {supervisor.NAME} as s; s.main({{orphan!r}})"
)
WORK, PACKAGE_INSIDE = "/megarl/work", "/megarl/package"  # bubblewrap's names for them; no host uses these
NOBODY = "65534"
USERS = range(20_000, 60_000)  # root runs each sandbox as one of them: limits per user are then its own
MIN_BUBBLEWRAP = (0, 7)  # the first that can bound a tmpfs
USER_NAMESPACE_LIMITS = (5, 14)  # the first kernel that counts processes per user namespace
SHARED_MEMORY, SHARED_MEMORY_BYTES = "/dev/shm", 64 << 20


@dataclass(frozen=True)
class Launch:
    """A plan that says how to start one sandbox, and what its supervisor must know.

    own_processes: it has a process namespace. count_processes: RLIMIT_NPROC counts only this sandbox.
    scratch: folders beside the work folder where it lets programs write. folder: one of the host, to remove afterwards.
    """

    argv: tuple[str, ...]
    work: str
    package_path: str
    own_processes: bool
    count_processes: bool
    confine: dict[str, Any]
    scratch: tuple[str, ...] = ()
    folder: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bubblewrap:
    """A root of its own, made of read-only parts of this machine's.

    user_namespace: unprivileged, or root that may not mount. proc: whether a fresh /proc may be mounted (some
    containers forbid it; without one, /dev/stdin does not work).
    """

    executable: str
    user_namespace: bool
    proc: bool
    name: str = "bubblewrap"

    def describe(self) -> str:
        kind = "user namespace" if self.user_namespace else "as root"
        return f"bubblewrap ({kind}{'' if self.proc else ', without /proc'})"

    def launch(self, view: View, limits: Limits) -> Launch:
        user = None if self.user_namespace or not view.others_may_read else spare_user()
        counted = user is not None or (os.getuid() != 0 and kernel() >= USER_NAMESPACE_LIMITS)
        shows_tmp = any(Path(path).is_relative_to("/tmp") for path in view.paths)
        argv = [
            *(self.executable, "--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox"),
            *(f"--unshare-{space}" for space in ("pid", "net", "ipc", "uts", "cgroup-try")),
            *self._identity(),
            *_show(view.paths),
            *(
                "--dev",
                "/dev",
                "--size",
                str(SHARED_MEMORY_BYTES),
                "--perms",
                "1777",
                "--tmpfs",
                SHARED_MEMORY,
            ),
            *("--remount-ro", "/dev"),
            *(("--proc", "/proc") if self.proc else ()),
            *("--size", str(limits.work_bytes), "--perms", "0777", "--tmpfs", WORK),
            *(() if shows_tmp else ("--symlink", WORK, "/tmp")),
            *("--ro-bind", str(PACKAGE / "inside"), f"{PACKAGE_INSIDE}/inside"),
            *("--remount-ro", "/", "--chdir", WORK, "--clearenv"),
            *(argument for pair in environment(WORK).items() for argument in ("--setenv", *pair)),
            *("--", *view.python, "-c", BOOT.format(path=PACKAGE_INSIDE, orphan=None)),
        ]
        return Launch(
            argv=tuple(argv),
            work=WORK,
            package_path=PACKAGE_INSIDE,
            own_processes=True,
            count_processes=counted,
            confine=_rules(user, own_namespaces=True),
            scratch=(SHARED_MEMORY,),
        )

    def _identity(self) -> tuple[str, ...]:
        if self.user_namespace:
            return ("--unshare-user", "--uid", NOBODY, "--gid", NOBODY)
        kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
        return ("--cap-drop", "ALL", *(part for name in kept for part in ("--cap-add", name)))


@dataclass(frozen=True)
class Landlock:
    """The fall-back: for containers that forbid namespaces, and machines without bubblewrap."""

    name: str = "landlock"

    def describe(self) -> str:
        return f"landlock (ABI {confine.landlock_abi()}, seccomp)"

    def launch(self, view: View, limits: Limits) -> Launch:
        user = spare_user() if view.others_may_reach else None
        folder = work_folder(user)
        devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
        writable = [folder, *(path for path in devices if os.path.exists(path))]
        files = {"read": list(view.paths), "write": writable}
        return _in_folder(folder, view, user, _rules(user, own_namespaces=False) | {"landlock": files})


@dataclass(frozen=True)
class Unconfined:
    """Limits and nothing else. Any program may read, change and send whatever the user of this process may."""

    name: str = "none"

    def describe(self) -> str:
        return "NO sandbox (unsafe_allow_unsandboxed)"

    def launch(self, view: View, limits: Limits) -> Launch:
        rules = {"uid": None, "landlock": None, "seccomp": None}
        return _in_folder(work_folder(None), view, None, rules)


Backend = Bubblewrap | Landlock | Unconfined  # immutable, shared by all sandboxes of a process


def bubblewrap_variants() -> list[Bubblewrap]:
    """Return the variants worth trying here, best first. Raises SandboxFailure without a bubblewrap that will do."""
    executable = shutil.which("bwrap")
    if executable is None:
        raise SandboxFailure("bwrap is not installed (Debian and Ubuntu: apt-get install bubblewrap)")
    answer = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=30).stdout
    version = tuple(int(part) for part in answer.split()[-1].split(".")[:2]) if answer.strip() else (0, 0)
    if version < MIN_BUBBLEWRAP:
        found = answer.strip() or executable
        raise SandboxFailure(f"{found} is too old; 0.7 or newer can bound the work folder")
    namespaces = [False, True] if os.geteuid() == 0 else [True]
    return [Bubblewrap(executable, user, proc) for user in namespaces for proc in (True, False)]


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def spare_user() -> int | None:
    """Draw a user number from `USERS`, for root that may change its user; None for anybody else."""
    if os.geteuid() != 0 or not _may_change_user():
        return None
    return USERS[secrets.randbelow(len(USERS))]


def work_folder(user: int | None) -> str:
    folder = tempfile.mkdtemp(prefix="megarl-code-")
    if user is not None:
        os.chown(folder, user, user)
        os.chmod(folder, 0o755)
    return folder


def environment(work: str) -> dict[str, str]:
    """Return all variables that a program sees: none of ours, and the same hash seed in every run."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "OPENSSL_CONF": os.devnull,  # Node does not start where it may not read the system's
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _rules(user: int | None, *, own_namespaces: bool) -> dict[str, Any]:
    program = seccomp.program(own_namespaces=own_namespaces, own_user=user is not None)
    return {"uid": user, "landlock": None, "seccomp": program}


def _in_folder(folder: str, view: View, user: int | None, rules: dict[str, Any]) -> Launch:
    return Launch(
        argv=(*view.python, "-c", BOOT.format(path=str(PACKAGE), orphan=(folder, os.getpid()))),
        work=folder,
        package_path=str(PACKAGE),
        own_processes=False,
        count_processes=user is not None,
        confine=rules,
        folder=folder,
        environment=environment(folder),
    )


def _show(paths: Iterable[str]) -> list[str]:
    """Return bubblewrap's arguments that make `paths` visible.

    Links lead to where they end, and anybody may pass through the parents of a path.
    """
    argv: list[str] = []
    parents = (parent for path in paths for parent in reversed(Path(path).parents) if parent != Path("/"))
    for parent in dict.fromkeys(parents):
        argv += ["--perms", "0755", "--dir", str(parent)]
    for path in paths:
        argv += ["--symlink", os.path.realpath(path)] if os.path.islink(path) else ["--ro-bind", path]
        argv.append(path)
    return argv


def _may_change_user() -> bool:
    """Return whether we have CAP_SETGID and CAP_SETUID, and a user namespace that knows `USERS`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    ranges = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    known = any(first <= USERS.start and USERS.stop <= first + count for first, _, count in ranges)
    return known and int(status["CapEff"], 16) >> 6 & 0b11 == 0b11
