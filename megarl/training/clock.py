"""Where a run's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds by phase, for the final table (`total`) and for each step's metrics (`step`)."""

    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.total[name] += seconds
            self.step[name] += seconds

    def take_step(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        taken, self.step = dict(self.step), defaultdict(float)
        return taken
