"""The first program inside a sandbox: runs the untrusted program once per request, and reports what came out.

It speaks over its standard streams (`wire.py`) and knows nothing of what is right: requests hold inputs only.
First frame in: the setup; out: "ready". Then, one at a time, a job in and a report out. The end of the input,
at any moment, ends it and everything below it.

Each job runs in a forked child that gives up its rights (`confine.py`) before it becomes the program. When
the child ends, or its time or output is used up, whatever it started is killed before the report is sent. Before
the next one, the folders are made as they were (`folder.py`).

This file and those beside it import as little as they can: they are loaded once for every response.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import select
import stat
import time

from . import confine, program, tree, wire
from .clock import FairClock
from .folder import WorkFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = __name__.rpartition(".")[2]
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 4  # of the kernel's flags of a process
CHUNK = 1 << 16
STDERR_BYTES = 4096
SIGPIPE = 13
FIRST_FREE_FD = 100
TICK = 0.01
CANNOT_RUN = 127  # as a shell reports it


def main(orphan: tuple[str, int] | None) -> None:
    """Serve until the input ends.

    orphan: a folder to remove if this process, our parent, is at its own end when ours comes."""
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD)
    replies = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    confine.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the program become our children
    confine.prctl(confine.PR_SET_DUMPABLE, 0)  # and none of them may look into us
    setup = wire.receive(requests)
    if setup is not None and (become := started(requests, replies, setup)) is not None:
        program.run(*become)  # we are the child
    elif orphan is not None and has_ended(orphan[1]):
        import shutil

        try:  # noqa: SIM105
            shutil.rmtree(orphan[0], ignore_errors=True)
        except RecursionError:
            pass


def has_ended(parent: int) -> bool:
    """Tell whether our parent has ended or is about to: its pipes are closed before its children change hands."""
    if os.getppid() != parent:
        return True
    try:
        with open(f"/proc/{parent}/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
    except OSError:
        return False
    return bool(flags & PF_EXITING)


def started(requests: int, replies: int, setup: dict[str, Any]) -> tuple[str, bytes, dict[str, Any]] | None:
    """Make ready, say so, and serve; see `Supervisor.serve`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    os.chdir(setup["work"])
    os.umask(0o022)
    for name, content in setup["files"].items():
        with open(name, "wb") as file:
            file.write(content)
    for name in setup["preload"]:  # once here rather than in every child
        __import__(name)
    supervisor = Supervisor(requests, replies, setup)
    wire.send(replies, wire.pack_report(wire.READY))
    os.dup2(1, 2)
    gc.freeze()  # collections in the children leave our pages alone, shared
    return supervisor.serve()


class Supervisor:
    """One sandbox's setup and its two channels."""

    def __init__(self, requests: int, replies: int, setup: dict[str, Any]) -> None:
        self.requests, self.replies, self.setup = requests, replies, setup
        self.folder = WorkFolder(setup["scratch"], setup["confine"]["uid"])
        self.folder.keep()

    def serve(self) -> tuple[str, bytes, dict[str, Any]] | None:
        """Answer jobs until the input ends (None), or return, in the child, what it is to become."""
        while (job := wire.receive(self.requests)) is not None:
            if not self.folder.renew():
                wire.send(self.replies, wire.pack_report(wire.SPOILED))
                continue
            streams = Streams(job)
            pid = os.fork()
            if pid == 0:
                return self._child(job, streams)
            report = self._watch(pid, job, streams)
            if report is None:
                return None
            wire.send(self.replies, report)
        self._sweep()
        return None

    def _child(self, job: dict[str, Any], streams: Streams) -> tuple[str, bytes, dict[str, Any]]:
        """Confine this process; then it is replaced by the job's command, or returned to become a Python program."""
        what = "confine the program"
        try:
            os.setsid()
            streams.install()
            os.closerange(FIRST_FREE_FD, FIRST_FREE_FD + 16)
            confine.apply({**self.setup["confine"], "limits": job["limits"]})
            if job["kind"] == "command":
                what = "run {!r}".format(job["argv"][0])
                confine.libc.signal(SIGPIPE, 0)  # Python ignores it; a command's default is to end
                os.execvpe(job["argv"][0], job["argv"], os.environ)
        except BaseException as error:
            if what.startswith("run './"):  # the program's own file, which it may have spoiled itself
                os._exit(CANNOT_RUN)
            os.write(streams.status_write, (f"could not {what}: {error}").encode())
            os._exit(1)
        os.close(streams.status_write)
        job["package_path"] = self.setup["package_path"]
        return job["kind"], self.setup["files"][program.FILE], job

    def _watch(self, pid: int, job: dict[str, Any], streams: Streams) -> bytes | None:
        """Wait for the child, its time or its output to end. Returns None if the other side is gone."""
        begin, cpu_before = time.monotonic(), children_cpu()
        clock = FairClock(job["wall_seconds"], lambda: tree.descendants(os.getpid()), job["most_seconds"])
        streams.close_child_ends()
        failure = streams.confinement_failure()
        kind, code, most_memory = wire.OUTPUT, 0, 0
        while True:
            got, status, usage = os.wait4(pid, os.WNOHANG)
            if got:
                signalled = os.WIFSIGNALED(status)
                kind = wire.SIGNAL if signalled else wire.EXIT
                code = os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
                most_memory = usage.ru_maxrss * 1024
                streams.drain()
                break
            if clock.left() <= 0:
                kind = wire.WALL
                break
            if streams.overflowed:
                break
            if not streams.read(self.requests):
                self._sweep()
                return None
        wall = time.monotonic() - begin
        self._sweep()
        if job.get("build"):
            make_executable(".")
            self.folder.keep()
        outputs = streams.collected()
        if failure:
            return wire.pack_report(wire.FAILURE, stderr=failure)
        kind = wire.OUTPUT if streams.overflowed else kind
        return wire.pack_report(kind, code, wall, children_cpu() - cpu_before, most_memory, **outputs)

    def _sweep(self) -> None:
        """Kill whatever is left of the program, and wait until it is gone."""
        end = time.monotonic() + 5
        while True:
            if self.setup["own_processes"]:
                tree.send(-1, tree.SIGKILL)
            else:
                tree.kill_all(os.getpid())
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if time.monotonic() > end:
                os._exit(70)  # the other side sees a lost sandbox and kills from outside
            time.sleep(0.001)


class Streams:
    """A child's standard streams and its result channel, read with bounds."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.stdin = os.memfd_create("stdin")
        data = memoryview(job["stdin"])
        while data:
            data = data[os.write(self.stdin, data) :]
        os.lseek(self.stdin, 0, os.SEEK_SET)
        self.status_read, self.status_write = os.pipe()
        self.bounds = {"stdout": job["output_bytes"], "stderr": 0}
        if job["kind"] == "call":
            self.bounds["result"] = job["output_bytes"]
        self.pipes = {name: os.pipe() for name in self.bounds}
        self.open = {ends[0]: name for name, ends in self.pipes.items()}
        self.data = {name: bytearray() for name in self.bounds}
        self.overflowed = ""

    def install(self) -> None:
        """Set the child's descriptors 0, 1, 2 and for a call 3; the status channel ends with the next exec."""
        os.dup2(self.stdin, 0)
        for number, name in enumerate(("stdout", "stderr", "result")[: len(self.pipes)], start=1):
            os.dup2(self.pipes[name][1], number + FIRST_FREE_FD * 2)
        status = fcntl.fcntl(self.status_write, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD * 3)
        os.closerange(3, FIRST_FREE_FD)
        for number in range(1, len(self.pipes) + 1):
            os.dup2(number + FIRST_FREE_FD * 2, number)
            os.close(number + FIRST_FREE_FD * 2)
        self.status_write = status

    def close_child_ends(self) -> None:
        os.close(self.stdin)
        os.close(self.status_write)
        for ends in self.pipes.values():
            os.close(ends[1])
            os.set_blocking(ends[0], False)

    def confinement_failure(self) -> bytes:
        """Wait until the child has become the program (empty), or says why it could not."""
        with open(self.status_read, "rb") as status:
            return status.read(CHUNK)

    def read(self, requests: int) -> bool:
        """Wait a tick for output. Returns False if the other side hung up (it never speaks while a job runs)."""
        wait = TICK if self.open else TICK / 10
        readable, _, _ = select.select([*self.open, requests], [], [], wait)
        for pipe in readable:
            if pipe != requests:
                self._take(pipe)
        return requests not in readable

    def drain(self) -> None:
        """Read what is still in the pipes when the child has ended."""
        for pipe in list(self.open):
            while pipe in self.open and not self.overflowed and self._take(pipe):
                pass

    def _take(self, pipe: int) -> bool:
        """Read once; return False at the end or when nothing waits. Only the end of stderr is kept."""
        name = self.open[pipe]
        try:
            data = os.read(pipe, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            del self.open[pipe]
            return False
        held = self.data[name]
        held += data
        if name == "stderr":
            del held[:-STDERR_BYTES]
        elif len(held) > self.bounds[name]:
            self.overflowed = name
        return True

    def collected(self) -> dict[str, bytes]:
        for ends in self.pipes.values():
            os.close(ends[0])
        return {name: bytes(data[: self.bounds[name] or None]) for name, data in self.data.items()}


def make_executable(folder: str) -> None:
    """Make files executable, as linkers do themselves where the filter of system calls lets them."""
    for name in os.listdir(folder):
        try:
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.getuid():
            os.fchmod(handle, status.st_mode | 0o111)
        os.close(handle)


def children_cpu() -> float:
    """Return the seconds of processor time of all descendants that have ended (we are their reaper)."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
