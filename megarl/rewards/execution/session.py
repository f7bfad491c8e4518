"""One program in one sandbox: start it, give it inputs one at a time, take back what it did, leave nothing behind.

Trust ends at the pipe. The supervisor inside reports what happened, and a hostile program may come to steer that
report; so a report is parsed with bounds, holds no verdict, and time and memory are watched from here as well. What
fails before the program's first byte runs is the sandbox's fault (`SandboxFailure`); all later is the program's.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megarl.rewards.execution.backends import Backend, Launch
from megarl.rewards.execution.cgroup import Cgroup, CgroupParents
from megarl.rewards.execution.inside import program, tree, wire
from megarl.rewards.execution.inside.clock import LONGEST_STRETCH, FairClock
from megarl.rewards.execution.limits import Ended, Limits, SandboxFailure, SandboxResult
from megarl.rewards.execution.view import View

BUILD_LIMITS = Limits(cpu_seconds=30, wall_seconds=60, memory_bytes=2 << 30)
START_SECONDS = 30.0
GRACE_SECONDS = 5.0  # for the supervisor to notice a time-out itself
WATCH_SECONDS = 0.025
FOLDER_SECONDS = 0.25
REPORT_OVERHEAD = 1 << 16
SUPERVISOR_SHARE = 32 << 20  # pages that a forked program shares with the supervisor count as its own


@dataclass(frozen=True)
class Sandbox:
    """A way to confine that works on this machine, and what it shows. `choose` makes one; it is reusable."""

    backend: Backend
    view: View
    cgroups: CgroupParents | None = None

    def session(self, files: Mapping[str, bytes], limits: Limits, *, build: Sequence[str] = ()) -> Session:
        """Return a session, which is a context manager.

        files: contents by name in the work folder; `main.py` is the Python program. limits: of a run, unless it
        has its own. build: a command (a compiler) to run before the first run; its files stay for all that follow.
        """
        return Session(self, files, limits, build)

    def describe(self) -> str:
        group = f", control groups v{self.cgroups.version}" if self.cgroups else ""
        return self.backend.describe() + group


class _SpoiledError(Exception):
    """An earlier run left something that could not be removed: the job was not begun, and needs a new sandbox."""


class Session:
    """Runs one program any number of times, each in the folder as the program's files and its build left it.

    It is not for several threads at once. within: seconds after which a run is over even where its `wall_seconds`
    are stretched (see `Limits`).
    """

    def __init__(
        self, sandbox: Sandbox, files: Mapping[str, bytes], limits: Limits, build: Sequence[str]
    ) -> None:
        self._sandbox, self._files, self._limits, self._build = sandbox, files, limits, list(build)
        self._live: _Live | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def script(self, stdin: bytes, limits: Limits | None = None, *, within: float = inf) -> SandboxResult:
        """Run `main.py` as a program."""
        return self._run({"kind": "script"}, stdin, limits, within)

    def call(
        self,
        function: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        limits: Limits | None = None,
        *,
        within: float = inf,
    ) -> SandboxResult:
        """Load `main.py` as a module and call a function of it; arguments are JSON-able."""
        job = {"kind": "call", "function": function, "args": list(args), "kwargs": dict(kwargs)}
        return self._run(job, b"", limits, within)

    def command(
        self, argv: Sequence[str], stdin: bytes, limits: Limits | None = None, *, within: float = inf
    ) -> SandboxResult:
        """Run a command in the work folder."""
        return self._run({"kind": "command", "argv": list(argv)}, stdin, limits, within)

    def build(self, *, within: float = inf) -> SandboxResult:
        """Start the sandbox afresh and run the build command; a lost sandbox is rebuilt without asking."""
        self.close()
        job = {"kind": "command", "argv": self._build, "build": True}
        return self._in_sandbox(job, b"", BUILD_LIMITS, within)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def _run(self, job: dict[str, Any], stdin: bytes, limits: Limits | None, within: float) -> SandboxResult:
        for _ in range(2):
            if self._build and (self._live is None or self._live.lost):
                self.build(within=within)
            with contextlib.suppress(_SpoiledError):
                return self._in_sandbox(job, stdin, limits or self._limits, within)
        return SandboxResult(
            ended="lost"
        )  # no run before it: the program has forged what the supervisor says

    def _in_sandbox(self, job: dict[str, Any], stdin: bytes, limits: Limits, within: float) -> SandboxResult:
        """Run a job, in a new sandbox if there is none that lives."""
        try:
            if self._live is None or self._live.lost:
                self.close()
                self._live = _Live(self._sandbox, self._files, self._limits)
            return self._live.run(job, stdin, limits, within)
        except OSError as error:  # what the system refuses us: processes, memory, descriptors
            self.close()
            raise SandboxFailure(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise


class _Live:
    """The processes of a started sandbox, and our ends of its pipes."""

    def __init__(self, sandbox: Sandbox, files: Mapping[str, bytes], limits: Limits) -> None:
        self.launch: Launch = sandbox.backend.launch(sandbox.view, limits)
        self.lost = False
        self._killers = sandbox.backend.name == "none"  # a program may signal its supervisor
        self._cgroup: Cgroup | None = None
        self._memory_kills = 0
        self._next_look = 0.0
        self._pids: list[int] = []  # the sandbox's own processes, the supervisor last
        self._below: list[int] = []  # the program's, as last seen
        self._process = subprocess.Popen(
            self.launch.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.launch.environment,
            start_new_session=True,
        )
        try:
            self._begin(sandbox, files, limits)
        except BaseException:
            self.close()
            raise

    def _begin(self, sandbox: Sandbox, files: Mapping[str, bytes], limits: Limits) -> None:
        setup = {
            "files": dict(files),
            "preload": imports(files.get(program.FILE, b"")),
            "work": self.launch.work,
            "package_path": self.launch.package_path,
            "own_processes": self.launch.own_processes,
            "confine": self.launch.confine,
            "scratch": list(self.launch.scratch),
        }
        clock = FairClock(START_SECONDS, lambda: [self._process.pid, *tree.descendants(self._process.pid)])
        report, ended = self._exchange(setup, clock, REPORT_OVERHEAD, None)
        if report != wire.pack_report(wire.READY)[wire.LENGTH.size :]:
            raise SandboxFailure(f"{sandbox.backend.describe()} did not start: {self._last_words(ended)}")
        self._pids = [self._process.pid, *tree.descendants(self._process.pid)]
        if sandbox.cgroups is not None:
            self._cgroup = sandbox.cgroups.make(limits)
            self._cgroup.add(self._pids)

    def run(self, job: dict[str, Any], stdin: bytes, limits: Limits, within: float) -> SandboxResult:
        begin = time.monotonic()
        wall, most = min(limits.wall_seconds, within), min(LONGEST_STRETCH * limits.wall_seconds, within)
        message = {
            **job,
            "stdin": stdin,
            "limits": limits.rlimits(count_processes=self.launch.count_processes),
            "wall_seconds": wall,
            "most_seconds": most,
            "output_bytes": limits.output_bytes,
        }
        largest = limits.output_bytes * 2 + REPORT_OVERHEAD
        supervisor = self._pids[-1]
        clock = FairClock(
            wall + GRACE_SECONDS,
            lambda: [supervisor, *tree.descendants(supervisor)],
            most=most + GRACE_SECONDS,
        )
        report, ended = self._exchange(message, clock, largest, limits)
        taken = time.monotonic() - begin
        kills = self._cgroup.memory_kills() if self._cgroup else 0
        killed, self._memory_kills = kills > self._memory_kills, kills
        if report is not None:
            try:
                run = _read(report, limits)
                return replace(run, ended="memory") if killed and not run.ok else run
            except ValueError:
                ended = "lost"  # not what our supervisor sends: somebody else wrote into its pipe
        self.lost = True
        from_outside = ended == "lost" and not killed and self._exit_code() < 0 and not self._killers
        self.close()
        if from_outside:
            raise SandboxFailure("the sandbox was killed from outside (by the kernel for memory, or by hand)")
        return SandboxResult(ended="memory" if ended == "lost" and killed else ended, wall_seconds=taken)

    def _exchange(
        self, content: Any, clock: FairClock, largest: int, limits: Limits | None
    ) -> tuple[bytes | None, Ended]:
        """Send a frame and await one.

        Returns (None, why) where none came: the time is over, a limit is passed, or the other end is gone.
        """
        outgoing = memoryview(wire.pack_request(content))
        incoming = bytearray()
        next_watch = 0.0
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            for pipe in (self._process.stdin, self._process.stdout):
                os.set_blocking(pipe.fileno(), False)
            selector.register(self._process.stdin, selectors.EVENT_WRITE)
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                for key, event in selector.select(WATCH_SECONDS):
                    if event == selectors.EVENT_WRITE:
                        with contextlib.suppress(BrokenPipeError):
                            outgoing = outgoing[os.write(key.fd, outgoing[: 1 << 16]) :]
                            if outgoing:
                                continue
                        selector.unregister(key.fileobj)
                    else:
                        data = os.read(key.fd, 1 << 20)
                        incoming += data
                        if not data or len(incoming) > largest:
                            return None, "lost"
                        if (frame := _frame(incoming)) is not None:
                            return frame, "exit"
                if clock.left() <= 0:
                    return None, "wall_time"
                now = time.monotonic()
                if limits is not None and now > next_watch:
                    next_watch = now + WATCH_SECONDS
                    if passed := self._passed(limits):
                        return None, passed

    def _passed(self, limits: Limits) -> Ended | None:
        """Return a limit that the sandbox's processes together have passed."""
        pids = self._below = tree.descendants(self._pids[-1])
        if tree.resident_bytes(pids) > limits.memory_bytes + SUPERVISOR_SHARE:
            return "memory"
        if tree.threads(pids) > limits.processes + 1:
            return "processes"
        if self.launch.folder is not None and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + FOLDER_SECONDS
            return "disk" if folder_bytes(self.launch.folder) > limits.work_bytes else None
        return None

    def _await_the_dead(self) -> None:
        """Wait until every process of the sandbox is gone, and bury those that are ours to bury.

        Where the sandbox was killed from outside, a namespace dies by itself, but not a tree that lost its root.
        Where this process inherits orphans (as the first one in a container, say), it has to bury them.
        """
        end = time.monotonic() + GRACE_SECONDS
        orphans = self._below if self.lost and not self.launch.own_processes else []
        for pid in orphans:
            tree.kill_all(pid)
            tree.send(pid, signal.SIGKILL)
        for pid in [*self._pids, *orphans]:
            while not tree.is_zombie(pid) and time.monotonic() < end:
                time.sleep(0.002)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def _exit_code(self) -> int:
        try:
            return self._process.wait(2)
        except subprocess.TimeoutExpired:
            return 0

    def _last_words(self, ended: Ended) -> str:
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = (self._process.stderr.read() or b"").decode("utf-8", "replace").strip()
        how = "not in time" if ended == "wall_time" else f"exit code {self._process.returncode}"
        return " ".join(said.split())[-400:] or how

    def close(self) -> None:
        """End the supervisor and all below it by the end of its input; kill from here what does not go."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if not self.lost or self.launch.own_processes is False:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5 if self.lost else 5)
        if self._process.poll() is None:
            tree.kill_all(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._process.kill()
        self._process.wait()
        self._await_the_dead()
        if self._cgroup is not None:
            self._cgroup.remove()
        if self.launch.folder is not None:
            remove_folder(self.launch.folder)


def remove_folder(folder: str) -> None:
    """Remove a work folder, though a program may have left folders too deep or closed for Python's own removal."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "check": False}
        subprocess.run(["chmod", "-R", "u+rwX", folder], **quiet)
        subprocess.run(["rm", "-rf", folder], **quiet)


def folder_bytes(folder: str) -> int:
    """Return the bytes taken by what is below `folder`, without what nobody can list."""
    total, waiting = 0, [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return total


def imports(source: bytes) -> list[str]:
    """Return which of the usual modules a program seems to import; a wrong guess costs a few milliseconds."""
    words = set(re.findall(rb"\b[a-z]+\b", source[: 1 << 20]))
    return [name for name in program.MODULES if name.encode() in words]


def _frame(data: bytearray) -> bytes | None:
    """Return the body of the first frame, once it is complete."""
    if len(data) < wire.LENGTH.size:
        return None
    end = wire.LENGTH.size + wire.LENGTH.unpack_from(data)[0]
    return bytes(data[wire.LENGTH.size : end]) if len(data) >= end else None


def _read(report: bytes, limits: Limits) -> SandboxResult:
    """Turn a report into a `SandboxResult`.

    Raises ValueError for what is no report, SandboxFailure for a failure that the supervisor reports, _SpoiledError
    where the job was not begun.
    """
    kind, code, wall, cpu, memory, stdout, stderr, result = wire.unpack_report(report)
    ended: Ended
    if kind == wire.FAILURE:
        raise SandboxFailure(stderr.decode("utf-8", "replace")[:500])
    if kind == wire.SPOILED:
        raise _SpoiledError
    if kind == wire.OUTPUT:
        ended = "output"
    elif cpu > limits.cpu_seconds or (kind == wire.SIGNAL and code == signal.SIGXCPU):
        ended = "cpu_time"
    elif kind == wire.WALL:
        ended = "wall_time"
    elif kind in (wire.EXIT, wire.SIGNAL):
        ended = "exit" if kind == wire.EXIT else "signal"
    else:
        raise ValueError(f"no report is of kind {kind}")
    return SandboxResult(ended, code, stdout, stderr, result, cpu, wall, memory)
