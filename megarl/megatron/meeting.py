"""Where a run's ranks meet before their process group is made: bounded, and with a word about who is missing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import torch.distributed as dist

from megarl.errors import UserError
from megarl.megatron.environment import Place, how_to_mend
from megarl.monitor.status import print_status

FIRST_WORD, NEXT_WORDS = 5.0, 15.0  # seconds of waiting until it is told, and between two lines
ATTEMPT = 10.0  # seconds that one attempt to connect may take


class RanksMissing(UserError):
    """Ranks did not meet in time. Every rank that knows of it tells, since others may not exist."""


def meet(place: Place, *, seconds: float, timeout: timedelta) -> dist.Store:
    """Return the store in which all ranks have said that they are there; `timeout` is what it waits for a key.

    Raises RanksMissing after so many seconds, naming the address or the ranks that are missing, and at once for a port
    in use and for two processes of one number.
    """
    patience = _Patience(seconds)
    store = _host(place) if place.rank == 0 and not place.agent else _connect(place, patience)
    store.set_timeout(timeout)
    met = dist.PrefixStore(f"megarl/{place.attempt}", store)
    try:
        if met.add(f"rank/{place.rank}", 1) > 1:
            raise RanksMissing(f"{_where(place)}: another process is rank {place.rank}, too. {how_to_mend()}")
        met.add("count", 1)
        while met.add("count", 0) < place.world_size:
            patience.wait(lambda: f"{_where(place)}: {_missing(met, place)}", told=place.rank == 0)
    except dist.DistError as error:
        raise RanksMissing(
            f"{_where(place)}: the store there is gone ({_first_line(error)}): rank 0 has ended"
        ) from None
    return met


class _Patience:
    """Waits in short naps, tells of it now and then, and ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._start = seconds, time.monotonic()
        self._next = FIRST_WORD

    @property
    def of_an_attempt(self) -> float:
        """Seconds that one attempt to connect may take."""
        return min(ATTEMPT, self._seconds)

    def wait(self, what: Callable[[], str], *, told: bool) -> None:
        """Wait a moment for what `what` says. Raises RanksMissing when the time is over."""
        waited = time.monotonic() - self._start
        if waited >= self._seconds:
            raise RanksMissing(f"{what()}, after {waited:.0f} s. {how_to_mend()}")
        if told and waited >= self._next:
            self._next = waited + NEXT_WORDS
            print_status(f"{what()} ({waited:.0f} s of at most {self._seconds:.0f} s)")
        time.sleep(0.02 if waited < 1 else 0.2)


def _where(place: Place) -> str:
    return f"rank {place.rank} of {place.world_size} at MASTER_ADDR={place.address} MASTER_PORT={place.port}"


def _host(place: Place) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            "localhost",
            place.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=ATTEMPT),
        )
    except dist.DistError as error:
        raise RanksMissing(
            f"{_where(place)}: rank 0 cannot listen there ({_first_line(error)}): set a free MASTER_PORT. "
            f"{how_to_mend()}"
        ) from None


def _connect(place: Place, patience: _Patience) -> dist.TCPStore:
    while True:
        try:
            return _ask(place, patience.of_an_attempt)
        except FutureTimeout:
            problem = "what listens there is not the ranks' store"
        except (OSError, UnicodeError, dist.DistError) as error:  # it may not be up yet, nor its name known
            problem = f"nothing answers there ({_first_line(error)})"
        patience.wait(lambda: f"{_where(place)}: {problem}", told=True)  # noqa: B023


def _ask(place: Place, seconds: float) -> dist.TCPStore:
    """One attempt to connect. In a thread that may hang: torch waits for whatever listens there without a bound."""
    answer: Future[dist.TCPStore] = Future()

    def connect() -> None:
        try:
            socket.create_connection((place.address, place.port), timeout=seconds).close()
            timeout = timedelta(seconds=ATTEMPT)
            answer.set_result(
                dist.TCPStore(place.address, place.port, wait_for_workers=False, timeout=timeout)
            )
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    return answer.result(seconds + 1)


def _missing(store: dist.Store, place: Place) -> str:
    absent = [str(rank) for rank in range(place.world_size) if not store.check([f"rank/{rank}"])]
    named = ", ".join(absent[:16]) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    return f"{'rank' if len(absent) == 1 else 'ranks'} {named} did not come"


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
