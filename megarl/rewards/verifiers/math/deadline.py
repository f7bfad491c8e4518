"""A bound on the processor time of a computation, for what no guard foresaw."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from sympy.core.cache import clear_cache

AGAIN_S = (
    0.1  # the exception may be swallowed where none may leave, as in a callback of the garbage collector
)


class OutOfTime(BaseException):
    """Not an Exception, so that no library takes it for its own."""


@contextlib.contextmanager
def processor_seconds(bound: float) -> Iterator[None]:
    """Raise OutOfTime in the block when it has used so many seconds of processor time.

    Signals reach the main thread only: in another one (never in a worker of the pool) nothing is bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    running = True

    def expire(*_: Any) -> None:
        if running:
            raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, bound, AGAIN_S)
    try:
        yield
    except OutOfTime:
        running = False
        clear_cache()  # it may hold what was half worked out
        raise
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
