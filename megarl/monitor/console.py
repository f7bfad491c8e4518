"""One readable line a step: only the numbers a person watches, under the short names the registry gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich import get_console
from rich.console import Console

from megarl.monitor.registry import Registry


class ConsoleSink:
    """`step  12/60 | reward 0.612 | acc 0.71 | len 48.1 | grad 0.88 | s/step 5.1 | tok/s 3.4k`

    total_steps: of the whole run, for the `12/60`; None leaves it out.
    console: the one the progress bars use, so that a line never cuts through a live bar.
    """

    def __init__(
        self, registry: Registry, *, total_steps: int | None = None, console: Console | None = None
    ) -> None:
        self._registry, self._total = registry, total_steps
        self._console = console or get_console()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = [
            f"{m.console} {number(metrics[m.name])}"
            for m in self._registry
            if m.console and m.name in metrics
        ]
        width = len(str(self._total or 0))
        count = f"step {step:>{width}}{f'/{self._total}' if self._total else ''}"
        self._console.print(" | ".join([count, *shown]), highlight=False, soft_wrap=True, markup=False)

    def close(self, exit_code: int = 0) -> None:
        pass


def number(value: float) -> str:
    """Return a number as a person reads it: three or four significant digits, `3.4k`, `1.2e-06`, `nan`.

    >>> [number(x) for x in (0.0, 0.61234, 48.12, 8.0, 3412.0, 2.5e7, 1.2e-6, float("nan"))]
    ['0', '0.612', '48.1', '8', '3.41k', '25M', '1.2e-06', 'nan']
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1000:
        return str(int(value))
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{suffix}" if size < 1000 * limit else f"{value:.2e}"
    return f"{value:.3g}" if size < 1e-3 else f"{value:.3f}" if size < 1 else f"{value:.3g}"
