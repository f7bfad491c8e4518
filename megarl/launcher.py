"""Start a run's ranks on this machine, and end with a useful exit code.

On a CPU the ranks are forks of this process, which imports torch and megatron-core once for all of them. Beside a GPU
they are fresh interpreters, since CUDA does not survive a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from megarl.config.schema import Config
from megarl.errors import EXIT_USER_ERROR, UserError
from megarl.megatron.settings import Layout
from megarl.monitor.status import print_status

MOST_RANKS = 4096
PR_SET_PDEATHSIG = 1
SECONDS_TO_SAY_SO = 2.0  # all ranks meet a mistake, and the one that tells it may not be the first to end
SECONDS_TO_END = 30.0  # between a signal and SIGKILL
WHAT_A_RUN_IMPORTS = ("megarl.training.train", "transformers.models.auto.tokenization_auto")


def under_torchrun() -> bool:
    """Return whether this process already is one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def ranks_on_this_machine(config: Config) -> int:
    """`launch.ranks`, else the GPUs, else on a CPU the fewest ranks that the layout allows."""
    import torch

    layout = config.parallel
    if config.launch.ranks is not None:
        ranks = config.launch.ranks
    elif config.platform != "cpu" and torch.cuda.is_available():
        ranks = torch.cuda.device_count()
    else:
        ranks = fewest_ranks(layout)
    if problem := layout.problem(ranks):
        raise UserError(f"parallel: {problem}; change parallel.* or launch.ranks")
    return ranks


def fewest_ranks(layout: Layout) -> int:
    """The fewest ranks that the layout allows. Raises UserError where they are more than one machine can have."""
    ranks = next((n for n in range(1, MOST_RANKS) if layout.problem(n) is None), None)
    if ranks is None:
        raise UserError(f"parallel: {layout.problem(1)}, nor any other up to {MOST_RANKS}; lower the degrees")
    return ranks


def launch(config: Config, arguments: Sequence[str]) -> int | None:
    """Start a run's ranks, unless this process is the only one. Returns as `start_ranks` does."""
    ranks = ranks_on_this_machine(config)
    if ranks == 1:
        return None
    return start_ranks(ranks, config.launch.threads_per_rank, arguments, WHAT_A_RUN_IMPORTS)


def start_ranks(
    ranks: int,
    threads: int,
    arguments: Sequence[str],
    imports: Sequence[str] = (),
    *,
    fork: bool | None = None,
) -> int | None:
    """Start so many ranks of the command `megarl ARGUMENTS`, which this process is.

    Returns None on a rank that is a fork of this process: it goes on with the command. Returns the exit code in this
    process, once all ranks have ended: 0, 2 for a user's mistake (a rank has said which), 128 + n when signal n ended
    the run, else 1.

    imports: modules that ranks need, loaded before they are forked. fork: None = where it is safe.
    """
    import torch

    fork = can_fork() if fork is None else fork
    if fork:
        for name in imports:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the ranks share these pages; a collection would copy them
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        this_process, started = os.getpid(), []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of the background
                die_with_parent(this_process)
                os.environ.update(_variables(rank, ranks, host, port, threads))
                if not fork:
                    os.execv(sys.executable, [sys.executable, "-m", "megarl", *arguments])
                torch.set_num_threads(threads)
                return None
            started.append(pid)
        store = torch.distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        code = _Ranks(started).wait()
        del store  # the ranks met there
        return code


def can_fork() -> bool:
    """Return whether forks of this process can be ranks: a lone thread on Linux, without CUDA."""
    import torch

    return sys.platform == "linux" and threading.active_count() == 1 and not torch.cuda.is_available()


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel end this rank when the process that started it dies, however it dies (Linux).

    parent: the id of that process, where it may have died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _variables(rank: int, ranks: int, host: str, port: int, threads: int) -> dict[str, str]:
    """Return what torchrun sets for the ranks of one machine, whose store is in the process that starts them."""
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **{name: str(value) for group, value in zip(names, (rank, ranks), strict=True) for name in group},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": str(threads),
    }


class _Ranks:
    """The processes of a run, in rank order, each the leader of a session."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._codes: dict[int, int] = {}
        self._signals: list[int] = []

    def wait(self) -> int:
        """Wait for the end of all ranks, which one rank's failure or a signal brings about; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, lambda number, _: self._signals.append(number))
        while self._running() and not self._signals and not any(self._codes.values()):
            time.sleep(0.1)
        if self._signals:
            self._end(self._signals[0])
            return 128 + self._signals[0]
        if EXIT_USER_ERROR in self._codes.values():
            self._wait_for(SECONDS_TO_SAY_SO)
        killed = {self._processes.index(pid): -code for pid, code in self._codes.items() if code < 0}
        self._end(signal.SIGTERM)
        for rank, ended_by in killed.items():
            print_status(
                f"megarl: rank {rank} was killed by signal {ended_by} ({signal.Signals(ended_by).name})"
            )
        codes = set(self._codes.values())
        return EXIT_USER_ERROR if EXIT_USER_ERROR in codes else int(codes != {0})

    def _running(self) -> list[int]:
        """Return the processes that have not ended."""
        for pid in self._processes:
            if pid not in self._codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self._processes if pid not in self._codes]

    def _wait_for(self, seconds: float) -> None:
        """Wait for their end, at most so long, and no longer when another signal comes."""
        deadline, signals = time.monotonic() + seconds, len(self._signals)
        while self._running() and time.monotonic() < deadline and len(self._signals) == signals:
            time.sleep(0.05)

    def _end(self, number: int) -> None:
        """Send the signal to all that still run and to what they started, and in the end kill them."""
        for last in (number, int(signal.SIGKILL)):
            for pid in self._running():
                try:
                    os.killpg(pid, last)
                except ProcessLookupError:  # it has not opened its session yet
                    os.kill(pid, last)
            self._wait_for(SECONDS_TO_END)
