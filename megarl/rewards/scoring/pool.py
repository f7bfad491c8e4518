"""A pool of scoring processes with a hard time bound.

Each slot is a thread with one worker process (`worker.py`). The thread sends a job and waits; when the bound
passes, it kills the worker with everything in its session, and another is forked from the pool's template.
The bound counts from the moment the verifier starts: neither waiting in the queue nor starting a process
counts, nor (on Linux) the time in which a crowded machine gave the worker no processor. A killed job is
unscored, never zero.

Why not `concurrent.futures` or `multiprocessing`: they cannot kill one hung task, and they fork a process
that may be running collectives or import the parent's main module in every worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megarl.rewards.contract import GroundTruth, Response, Score
from megarl.rewards.execution.inside.clock import FairClock
from megarl.rewards.scoring.protocol import FORK, PACKET, READY, REAP, STARTED

START_TIMEOUT_S = 300.0  # imports, on a machine as busy as it may get
START_ATTEMPTS = 3


@dataclass(frozen=True, eq=False)
class _Job:
    message: bytes
    timeout_s: float
    future: Future[Score]


class WorkerPool:
    """Scores jobs that any thread may `submit`; `close` leaves no process. Processes start with the first job.

    workers: processes, at least 1. preload: import paths of verifiers that the template imports; others are
    imported by each worker when first used. memory_bytes: soft limit of a worker's address space, None for none.
    """

    def __init__(self, workers: int, preload: Iterable[str] = (), *, memory_bytes: int | None = None) -> None:
        self._workers = workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._preload = set(preload)
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._template_lock = threading.Lock()
        self._template: _Template | None = None
        self._pids: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def preload(self, path: str) -> None:
        """Have a verifier imported by the template, if no job has started it yet."""
        self._preload.add(path)

    def submit(
        self,
        path: str,
        response: Response,
        ground_truth: GroundTruth,
        options: Mapping[str, Any],
        timeout_s: float,
    ) -> Future[Score]:
        """Score one response; the future never raises but when the pool is closed (CancelledError)."""
        future: Future[Score] = Future()
        job = {"path": path, "response": response, "ground_truth": ground_truth, "options": dict(options)}
        try:
            message = pickle.dumps(job)
        except Exception as error:
            future.set_result(Score(None, reason=f"the ground truth cannot be sent to a worker: {error}"))
            return future
        with self._lock:
            if self._closed:
                raise RuntimeError("the scoring pool is closed")
            self._jobs.put(_Job(message, timeout_s, future))
            while len(self._threads) < self._workers:
                name = f"scoring-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._slot, name=name, daemon=True))
                self._threads[-1].start()
        return future

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the workers' process ids, and the template's."""
        with self._lock:
            template = () if self._template is None else (self._template.process.pid,)
            return (*self._pids, *template)

    def close(self) -> None:
        """Kill the workers, cancel what waits, leave no process. Idempotent."""
        with self._lock:
            self._closed = True
            for pid in self._pids:
                _kill_group(pid)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        with self._lock:
            template, self._template = self._template, None
        if template is not None:
            template.end()

    # Everything below runs in a slot's thread.

    def _slot(self) -> None:
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None:
                    worker = self._fork()
                score = worker.run(job)
            except Exception as error:
                how = self._end(worker) or f"{type(error).__name__}: {error}"
                timed_out = isinstance(error, _TimedOut)
                score = Score(None, reason=str(error) if timed_out else f"the scoring worker died ({how})")
                worker = None
            job.future.set_result(score)
        self._end(worker)

    def _fork(self) -> _Worker:
        """Return a worker that is ready. Where the template turns out to be dead or dying, from another one."""
        for left in reversed(range(START_ATTEMPTS)):
            try:
                return self._fork_once()
            except (OSError, EOFError, ValueError):
                if self._closed or not left:
                    raise
        raise AssertionError("unreachable")

    def _fork_once(self) -> _Worker:
        with self._template_lock:
            if self._closed:
                raise RuntimeError("the scoring pool is closed")
            if self._template is None or not self._template.alive:
                template = _Template(sorted(self._preload), self._memory_bytes)
                with self._lock:
                    self._template = template
                template.prepare()
            try:
                worker = self._template.fork()
            except BaseException:
                self._template.end()
                raise
            with self._lock:
                self._pids.add(worker.pid)
                if self._closed:
                    _kill_group(worker.pid)
        try:
            worker.receive(START_TIMEOUT_S, READY)
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker | None) -> str | None:
        """Kill a worker that still lives; return how it ended, None if that cannot be known."""
        if worker is None:
            return None
        with self._lock:
            self._pids.discard(worker.pid)
        _kill_group(worker.pid)
        worker.connection.close()
        with self._template_lock, contextlib.suppress(OSError, ValueError):
            if self._template is not None and self._template.alive:
                code = os.waitstatus_to_exitcode(self._template.reap(worker.pid))
                return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return None


class _TimedOut(Exception):
    """The worker has to go: its time is over."""


class _Template:
    """The process that workers are forked from, and our end of its control socket."""

    def __init__(self, preload: list[str], memory_bytes: int | None) -> None:
        self._setup = json.dumps({"preload": preload, "memory_bytes": memory_bytes}).encode()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megarl.rewards.scoring.worker", str(theirs.fileno())],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the parent
            )
        self._control.settimeout(START_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def prepare(self) -> None:
        if self._ask(self._setup) != READY:
            raise RuntimeError("the scoring template did not start")

    def fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
            pid = int(self._control.recv(PACKET))
        return _Worker(pid, Connection(ours.detach()))

    def reap(self, pid: int) -> int:
        """Return the wait status of a worker that is dead or dying."""
        return int(self._ask(REAP + str(pid).encode()))

    def end(self) -> None:
        self._control.close()
        _kill_group(self.process.pid)
        self.process.wait()

    def _ask(self, message: bytes) -> bytes:
        self._control.send(message)
        return self._control.recv(PACKET)


class _Worker:
    """One worker process and our end of its socket."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection

    def run(self, job: _Job) -> Score:
        self.connection.send_bytes(job.message)
        self.receive(START_TIMEOUT_S, STARTED)
        value, parts, reason = json.loads(self.receive(job.timeout_s))
        return Score(value, parts, reason)

    def receive(self, timeout_s: float, expected: bytes | None = None) -> bytes:
        """Return the next message. Raises _TimedOut after `timeout_s` in which the worker could run."""
        clock = FairClock(timeout_s, lambda: [self.pid])
        while not self.connection.poll(max(clock.left(), 0.0)):
            if clock.left() <= 0.001:
                raise _TimedOut(f"timed out after {timeout_s:g} s")
        message = self.connection.recv_bytes()
        if expected is not None and message != expected:
            raise RuntimeError(f"sent {message[:40]!r} instead of {expected!r}")
        return message


def _kill_group(pid: int) -> None:
    """Kill a process and everything in its group, also what it left behind when it died."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Return the parent's import path, and one numerical thread: the pool's parallelism is its processes."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
