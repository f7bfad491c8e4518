"""What a program under test can see of this machine: an interpreter, the system's libraries, nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import UserError
from megarl.settings import user_path

LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache")
PROGRAMS = ("/usr", "/bin", "/sbin", "/etc/alternatives")
ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"


@dataclass(frozen=True)
class View:
    """Everything a program can see of this machine.

    python: the interpreter and its flags. paths: files and folders that exist, shown read-only."""

    python: tuple[str, ...]
    paths: tuple[str, ...]

    @property
    def others_may_read(self) -> bool:
        """Return whether a user who owns nothing can read the folders themselves (their parents apart)."""
        return all(_others_may(Path(path)) for path in self.paths)

    @property
    def others_may_reach(self) -> bool:
        """Return the same with all parents, as it matters where the file system is the host's own."""
        return self.others_may_read and all(
            _others_may(parent) for path in self.paths for parent in Path(path).resolve().parents
        )


def make_view(python: str | None = None, *, programs: bool = False, read_only: Iterable[str] = ()) -> View:
    """Return the view for Python programs, with `programs` for those of /usr too (compilers, other interpreters).

    python: an interpreter with its installed packages; None: the one that runs megarl, standard library only.
    read_only: more files or folders to show.
    Raises UserError for an interpreter that does not run and for a path that does not exist.
    """
    if python is None:
        command: tuple[str, ...] = (getattr(sys, "_base_executable", sys.executable), "-s", "-S")
        needed = [command[0], sys.base_prefix, sys.base_exec_prefix]
    else:
        found = shutil.which(user_path(python, "code sandbox: python"))
        if found is None:
            raise UserError(f"code sandbox: there is no Python interpreter {python!r}")
        command = (os.path.abspath(found), "-s")
        needed = [command[0], *_prefixes(python)]
    read_only = [str(user_path(path, "code sandbox: read_only")) for path in read_only]
    for path in read_only:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise UserError(f"code sandbox: read_only path {path!r} must be absolute and exist")
    system = LIBRARIES + PROGRAMS if programs else LIBRARIES
    wanted = [*system, *needed, *map(os.path.realpath, needed), *read_only]
    return View(command, tuple(_outermost(path for path in wanted if os.path.exists(path))))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Leave out the paths that lie in another one of them.

    Links (merged /usr: /lib -> usr/lib) stay, and what lies behind one of them (a linked environment's interpreter)
    is named by where it really is.
    """
    named = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    links = {path for path in named if os.path.islink(path)}
    unique = list(dict.fromkeys(_behind(path, links) for path in named))
    return [
        path
        for path in unique
        if os.path.islink(path)
        or not any(other != path and Path(path).is_relative_to(other) for other in unique)
    ]


def _behind(path: str, links: set[str]) -> str:
    if not any(str(parent) in links for parent in Path(path).parents):
        return path
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _prefixes(python: str) -> list[str]:
    try:
        answer = subprocess.run([python, "-I", "-S", "-c", ASK], capture_output=True, timeout=60, check=True)
        with_site = subprocess.run([python, "-I", "-c", ASK], capture_output=True, timeout=60, check=True)
        return [*json.loads(answer.stdout), *json.loads(with_site.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"code sandbox: the interpreter {python!r} does not run: {error}") from None


def _others_may(path: Path) -> bool:
    needed = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & needed == needed
