"""Start a run's ranks on this machine, and end with a useful exit code.

On a CPU the ranks are forks of this process, which imports torch and megatron-core once for all of them. Beside a GPU
they are fresh interpreters, since CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
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
from megarl.megatron.environment import Place, forget_place, how_to_mend
from megarl.megatron.settings import Layout
from megarl.monitor.signals import END_NOW, SAME_SIGNAL, STOPS, killed_by
from megarl.monitor.status import print_status

MOST_RANKS = 4096
PR_SET_PDEATHSIG = 1
SECONDS_TO_SAY_SO = 2.0  # all ranks meet a mistake, and the one that tells it may not be the first to end
SECONDS_TO_END = 10.0  # between END_NOW and SIGKILL
SECONDS_TO_FOLLOW = 30.0  # between the end of the first rank that a signal stopped and SIGKILL for the others
WHAT_A_RUN_IMPORTS = ("megarl.training.train", "transformers.models.auto.tokenization_auto")


def check_alone(config: Config, place: Place) -> None:
    """Raise UserError where the environment names one rank, and the configuration more."""
    if place.world_size > 1:
        return
    asked = config.launch.ranks or 1
    if asked > 1 or config.parallel.problem(1):
        what = (
            f"launch.ranks={asked}" if asked > 1 else f"parallel needs {fewest_ranks(config.parallel)} ranks"
        )
        raise UserError(
            f"{what}, but RANK={place.rank} and WORLD_SIZE=1 in the environment say that this process is "
            f"the only rank. {how_to_mend()}"
        )


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
    forget_place()
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
    process, once all ranks have ended: 0, 2 for a user's mistake (a rank has said which), 128 + n when signal n told
    the run to end, else 1, and the rank at fault is named.

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
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until somebody takes them
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.setsid()
                if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a job of the background
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
                die_with_parent(this_process)
                forget_place()
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
        self._codes: dict[int, int] = {}  # by process, in the order of their ends
        self._signals: list[tuple[int, float]] = []  # that told this process to end, and when
        self._killed = False

    def wait(self) -> int:
        """Wait for the end of all ranks, which one rank's failure or a signal brings about; returns the exit code.

        The first signal is passed on to the ranks, which end when they are ready to. At the second they are killed.
        """
        for number in (*STOPS, signal.SIGQUIT):
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        passed_on = 0
        while self._running() and not any(self._codes.values()) and not self._killed:
            if self._signals and not passed_on:
                passed_on = self._signals[0][0]
                self._send(passed_on)
            time.sleep(0.1)
        if not self._killed and not any(self._codes.values()):
            return 0
        told = passed_on or next((n for n in STOPS if 128 + n in self._codes.values()), 0)
        if told and not self._killed and set(self._codes.values()) <= {0, *_stopped(told)}:
            if not passed_on:  # it reached one rank alone, perhaps before training
                self._send(told)
            self._wait_for(SECONDS_TO_FOLLOW)
        if told and (self._killed or set(self._codes.values()) <= {0, *_stopped(told)}):
            self._end()
            if self._killed:
                print_status("megarl: ended at once by a second signal")
            return 128 + told
        return self._fail()

    def _fail(self) -> int:
        """Name the rank at fault, end the others; returns the exit code."""
        first = list(self._codes)
        self._wait_for(SECONDS_TO_SAY_SO)  # those that miss it notice, and close what they have
        at_fault = [pid for pid in self._codes if self._codes[pid] < 0] or first
        codes = {pid: self._codes[pid] for pid in at_fault if self._codes[pid]}
        wrong = EXIT_USER_ERROR in self._codes.values()
        for pid, code in codes.items():
            if code < 0 or not wrong:
                how = (
                    killed_by(-code) if code < 0 else f"ended with exit code {code}; its own words are above"
                )
                print_status(f"megarl: rank {self._processes.index(pid)} {how}")
        self._send(END_NOW)
        self._wait_for(SECONDS_TO_END)
        self._end()
        return EXIT_USER_ERROR if wrong else 1

    def _note(self, number: int, _: object) -> None:
        """A signal has come. The second one kills the ranks, whatever this process is at."""
        now = time.monotonic()
        if self._signals and now - self._signals[0][1] > SAME_SIGNAL:
            self._killed = True
            self._send(signal.SIGKILL)
        self._signals.append((number, now))

    def _running(self) -> list[int]:
        """Return the processes that have not ended."""
        for pid in self._processes:
            if pid not in self._codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self._processes if pid not in self._codes]

    def _wait_for(self, seconds: float) -> None:
        """Wait for their end, at most so long."""
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _send(self, number: int) -> None:
        """Send a signal to those that run; SIGKILL to what they started, too."""
        for pid in self._processes:
            if pid not in self._codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    if number == signal.SIGKILL:
                        os.killpg(pid, number)

    def _end(self) -> None:
        self._send(signal.SIGKILL)
        self._wait_for(SECONDS_TO_END)


def _stopped(number: int) -> tuple[int, int]:
    """The exit codes of a rank that this signal has ended: in good order, or as it ends any process."""
    return 128 + number, -number
