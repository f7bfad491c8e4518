"""Time limits that a crowded machine does not cut short: for sandboxed programs and for scoring workers."""

from __future__ import annotations

import time

from . import tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_STRETCH = 10.0  # a limit is stretched by the time without a processor, up to so many times


class FairClock:
    """Counts `seconds` down, but for the time in which a process could run and the machine gave it no processor.

    processes: returns the ids of those who are waited for; of all their threads the one that was kept waiting longest
    counts. What they take from each other is their own affair: no less is counted than the processor time of them all.
    most: seconds after which the time is over whatever happened; never more than LONGEST_STRETCH times `seconds`. Where
    /proc does not tell (no Linux, no /proc), it is a plain clock.
    """

    def __init__(
        self, seconds: float, processes: Callable[[], list[int]], most: float = float("inf")
    ) -> None:
        self._seconds, self._most = seconds, min(most, LONGEST_STRETCH * seconds)
        self._processes = processes
        self._before = tree.scheduled(processes())
        self._begin = time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left at least; 0 or less when the time is over."""
        passed = time.monotonic() - self._begin
        left = self._seconds - passed
        if left <= 0:
            ran, waited = 0.0, 0.0
            for thread, (on, off) in tree.scheduled(self._processes()).items():
                on_before, off_before = self._before.get(thread, (0.0, 0.0))
                ran, waited = ran + on - on_before, max(waited, off - off_before)
            left = self._seconds - max(passed - waited, ran)
        return min(left, self._most - passed)
