"""Run a function on several gloo ranks: processes that are forked for each job, with everything imported.

A job is a module-level function `job(**arguments)`; it runs with torchrun's variables set, calls
`megarl.megatron.groups.initialize` itself, and returns something picklable. Waits are bounded; a failing or hanging
rank ends the job with that rank's traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.forks import fork, pipe


def _serve(
    pipe: Connection, job: tuple[str, str], environment: dict[str, str], given: bytes, limit: float
) -> None:
    """A rank: one job, then its end."""
    faulthandler.dump_traceback_later(limit * 0.7)  # a hanging rank says where it hangs
    os.environ.update(environment)
    from megarl.megatron.groups import destroy_groups

    module, name = job
    try:
        result = getattr(importlib.import_module(module), name)(**pickle.loads(given))
        destroy_groups()
        answer = (True, result)
    except BaseException as error:
        answer = (False, (error.__class__.__name__, str(error), traceback.format_exc()))
    pipe.send_bytes(pickle.dumps(answer))  # not `send`, which would leave tensors in this process's memory


class RankFailed(Exception):
    """kind: the name of the exception on the rank; message: its text."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.kind, self.message = kind, message


class RankPool:
    def run(self, size: int, job: Callable[..., Any], timeout: float = 240, **arguments: Any) -> list[Any]:
        """The results of `job(**arguments)` on ranks 0..size-1, in rank order.

        Raises RankFailed for the first that raises, RuntimeError for one that dies, TimeoutError.
        """
        from torch.distributed import TCPStore

        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        meeting = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        given, ranks = pickle.dumps(arguments), {}
        try:
            for rank in range(size):
                read, write = pipe()
                environment = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                function = (job.__module__, job.__qualname__)
                ranks[read] = rank, fork(_serve, write, function, environment, given, timeout)
                write.close()
            results = _gather(ranks, timeout)
        finally:
            for _, process in ranks.values():
                process.kill()
                process.join()
        del store  # the ranks met there
        return [results[rank] for rank in range(size)]


def _gather(ranks: dict[Connection, tuple[int, BaseProcess]], timeout: float) -> dict[int, Any]:
    """What the ranks send."""
    results: dict[int, Any] = {}
    waiting, deadline = set(ranks), time.monotonic() + timeout
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(ranks[read][0] for read in waiting)
            raise TimeoutError(f"ranks {late} did not finish in {timeout} s")
        for read in ready:
            rank, process = ranks[read]
            try:
                ok, result = pickle.loads(read.recv_bytes())
            except EOFError:
                process.join(5)
                raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
            if not ok:
                raise RankFailed(rank, *result)
            results[rank] = result
            waiting.remove(read)
    return results
