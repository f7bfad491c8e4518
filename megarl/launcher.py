"""Start a run's ranks on this machine with torch's own elastic agent, and end with a useful exit code."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from megarl.config.schema import Config
from megarl.errors import EXIT_USER_ERROR, UserError
from megarl.megatron.settings import Layout

MOST_RANKS = 4096
PR_SET_PDEATHSIG = 1


def under_torchrun() -> bool:
    """Whether this process already is one of several ranks."""
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


def launch(config: Config, arguments: Sequence[str]) -> int:
    """Run `python -m megarl ARGUMENTS` on every rank of a run; returns the exit code (see `start_ranks`)."""
    return start_ranks(ranks_on_this_machine(config), config.launch.threads_per_rank, arguments)


def start_ranks(ranks: int, threads: int, arguments: Sequence[str]) -> int:
    """Run `python -m megarl ARGUMENTS` on so many ranks; returns the exit code: 0, 2 for a user's mistake (the rank
    has said which), 128 + n when signal n ended it, else 1."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "megarl", *arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return EXIT_USER_ERROR if EXIT_USER_ERROR in codes else 1
    except SignalException as signalled:  # Ctrl-C, kill: the ranks are ended by now
        return 128 + int(signalled.sigval)
    return 0


def die_with_parent() -> None:
    """Let the kernel end this rank when the process that started it dies, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
