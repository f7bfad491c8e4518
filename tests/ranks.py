"""Run a function on several gloo ranks: processes that are started once a session and used again for each job.

A job is a module-level function `job(**arguments)`; it runs with torchrun's variables set, calls
`megarl.megatron.groups.initialize` itself, and returns something picklable. Waits are bounded; a failing or hanging
rank ends the job with that rank's traceback, and its processes are replaced.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

# A destroyed gloo group leaves a thread that wakes all the time; a worker with so many is replaced.
MOST_THREADS = 500


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(pipe: Connection) -> None:
    """The worker's loop: one job at a time, each with a process group of its own."""
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    while True:
        job = pipe.recv()
        if job is None:
            return
        module, name, environment, arguments, timeout = job
        faulthandler.dump_traceback_later(timeout * 0.7)  # a hanging rank says where it hangs
        os.environ.update(environment)
        try:
            result = getattr(importlib.import_module(module), name)(**arguments)
            pipe.send((True, result, len(os.listdir("/proc/self/task"))))
        except BaseException as error:
            pipe.send((False, (error.__class__.__name__, str(error), traceback.format_exc()), 0))
        finally:
            faulthandler.cancel_dump_traceback_later()
            from megarl.megatron.groups import finish

            finish()


class RankFailed(Exception):
    """kind: the name of the exception on the rank; message: its text."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.kind, self.message = kind, message


class RankPool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, size: int, job: Callable[..., Any], timeout: float = 120, **arguments: Any) -> list[Any]:
        """The results of `job(**arguments)` on ranks 0..size-1, in rank order."""
        self._grow(size)
        port = free_port()
        workers = self.workers[:size]
        for rank, (_, pipe) in enumerate(workers):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            pipe.send((job.__module__, job.__qualname__, environment, arguments, timeout))
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        most_threads = 0
        while len(results) < size:
            for rank, (process, pipe) in enumerate(workers):
                if rank in results or not pipe.poll(0.01):
                    if not process.is_alive():
                        self._died(rank)
                    continue
                try:
                    ok, result, threads = pipe.recv()
                except EOFError:
                    self._died(rank)
                most_threads = max(most_threads, threads)
                if not ok:
                    self.close()
                    raise RankFailed(rank, *result)
                results[rank] = result
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(
                    f"ranks {sorted(set(range(size)) - set(results))} did not finish in {timeout} s"
                )
        if most_threads > MOST_THREADS:
            self.close()
        return [results[rank] for rank in range(size)]

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self.workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.workers.append((process, ours))

    def _died(self, rank: int) -> NoReturn:
        process = self.workers[rank][0]
        process.join(5)
        self.close()
        raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}")

    def close(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()
