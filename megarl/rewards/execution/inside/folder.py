"""The work folder: every run finds the program's files and what its build made, and nothing that another run left."""

from __future__ import annotations

import marshal
import os
import select
import stat

from . import confine, tree
from .clock import FairClock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PATIENCE_S, KEEPING_S = 2.0, 30.0
CHUNK = 1 << 20


class WorkFolder:
    """The current folder. scratch: others where programs may write, empty at first. user: the programs', or None.

    What was kept is below numbers that a program's process closes. All is done as the programs' user would, who may
    own files that we may not read.
    """

    def __init__(self, scratch: list[str], user: int | None) -> None:
        self._scratch, self._user = scratch, user
        self._store = os.memfd_create("kept")
        self._kept: dict[
            str, tuple[int, ...]
        ] = {}  # path: mode, size, where its content begins, inode, ctime

    def keep(self) -> None:
        """Keep what is here now, for all runs to come. Raises OSError where that cannot be."""
        os.ftruncate(self._store, 0)
        kept = self._as_user(self._stored, KEEPING_S)
        if kept is None:
            raise OSError("what a build made cannot be read")
        self._kept = marshal.loads(kept)

    def renew(self) -> bool:
        """Put things back as they were kept. Returns whether that could be done, and in a short time."""
        if self._is_as_kept():
            return True
        kept = self._as_user(self._restored, PATIENCE_S)
        if kept is None:
            return False
        self._kept = marshal.loads(kept)
        return True

    def _is_as_kept(self) -> bool:
        """Tell whether nothing was changed. Nobody can set a file's ctime, which every change of it sets."""
        try:
            if any(os.listdir(folder) for folder in self._scratch):
                return False
            unseen = dict(self._kept)
            for path in _paths(known=self._kept):
                mode, _, _, inode, changed = unseen.pop(path)
                now = os.lstat(path)
                same = stat.S_ISDIR(mode) or now.st_ctime_ns == changed
                if not same or (now.st_mode, now.st_ino) != (mode, inode):
                    return False
        except (KeyError, OSError):
            return False
        return not unseen

    def _as_user(self, work: Callable[[], dict[str, tuple[int, ...]]], patience: float) -> bytes | None:
        """Return the marshalled outcome of `work`; None where it fails or takes too long."""
        outcome, out = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                confine.apply({"limits": {}, "uid": self._user, "landlock": None, "seccomp": None})
                with open(out, "wb") as file:
                    file.write(marshal.dumps(work()))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(out)
        clock = FairClock(patience, lambda: [pid])
        with open(outcome, "rb") as file:
            while not select.select([file], [], [], max(clock.left(), 0))[0]:
                if clock.left() <= 0:
                    tree.send(pid, tree.SIGKILL)
                    break
            told = file.read()
        return told if os.waitpid(pid, 0)[1] == 0 else None

    def _stored(self) -> dict[str, tuple[int, ...]]:
        end, kept = 0, dict[str, "tuple[int, ...]"]()
        for path in _paths():
            status, start = os.lstat(path), end
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    while data := file.read(CHUNK):
                        end += os.pwrite(self._store, data, end)
            elif stat.S_ISLNK(status.st_mode):
                end += os.pwrite(self._store, os.fsencode(os.readlink(path)), end)
            kept[path] = status.st_mode, end - start, start, status.st_ino, status.st_ctime_ns
        return kept

    def _restored(self) -> dict[str, tuple[int, ...]]:
        for folder in [*self._scratch, "."]:
            empty(folder)
        for path, (mode, size, start, *_) in self._kept.items():
            if stat.S_ISDIR(mode) and path != ".":
                os.mkdir(path, 0o700)
            elif stat.S_ISLNK(mode):
                os.symlink(os.pread(self._store, size, start), path)
            elif stat.S_ISREG(mode):
                with open(path, "xb") as file:
                    for at in range(start, start + size, CHUNK):
                        file.write(os.pread(self._store, min(CHUNK, start + size - at), at))
        kept = {}
        for path, (mode, size, start, *_) in reversed(
            list(self._kept.items())
        ):  # a folder is closed after its files
            if not stat.S_ISLNK(mode) and os.lstat(path).st_mode != mode:
                os.chmod(path, stat.S_IMODE(mode))
            status = os.lstat(path)
            kept[path] = mode, size, start, status.st_ino, status.st_ctime_ns
        return dict(reversed(list(kept.items())))


def empty(folder: str) -> None:
    """Remove all that is in a folder, however deep, closed or strangely named; links are not followed.

    Folders within folders are moved up and emptied there, so that no path grows long.
    """
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    os.chdir(folder)
    if not os.access(".", os.R_OK | os.W_OK | os.X_OK):
        os.chmod(".", 0o700)
    waiting = os.listdir(".")
    taken, number = set(waiting), 0
    while waiting:
        name = waiting.pop()
        if not stat.S_ISDIR(os.lstat(name).st_mode):
            os.unlink(name)
            continue
        os.chmod(name, 0o700)
        for inner in os.listdir(name):
            path = name + "/" + inner
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            while str(number) in taken:
                number += 1
            taken.add(str(number))
            os.chmod(path, 0o700)  # a folder that is moved is written to
            os.rename(path, str(number))
            waiting.append(str(number))
        os.rmdir(name)
    os.fchdir(here)
    os.close(here)


def _paths(known: Iterable[str] | None = None) -> list[str]:
    """Return the current folder and all paths in it, parents first. known: stop at the first that is none of these."""
    found, waiting = ["."], ["."]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                found.append(entry.path)
                if known is not None and entry.path not in known:
                    return found
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return found
