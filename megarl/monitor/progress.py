"""Progress of one phase: a live bar on a terminal, a plain line now and then in a log file.

    with progress("Generating", total=128, unit="responses", enabled=rank == 0) as bar:
        for result in results:
            bar.advance()

The bar disappears when the phase ends. In a log file a phase that is over within `interval` seconds prints
nothing, a longer one prints how far it is, how fast, and how long it will still take. Set-up steps, which
happen once, pass `announce=True`: their end is always told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import get_console
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class Bar:
    """What a phase reports to. This one shows nothing."""

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""

    def update(self, *, description: str) -> None:
        """Rename the phase."""


@contextmanager
def progress(
    description: str,
    total: float | None = None,
    *,
    unit: str = "",
    enabled: bool = True,
    announce: bool = False,
    console: Console | None = None,
    interval: float = 15.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Bar]:
    """Show the progress of a phase while the block runs.

    total: amount of work in `unit`; None if it isn't known, then only the count and the rate are shown.
    enabled: False on every rank but the one that speaks.
    announce: tell the end of this phase in a log file and on a terminal, however short it was.
    console: where to; by default rich's own, which the console sink shares: so bars nest, and a line printed
        meanwhile goes above them.
    interval: seconds between lines in a log file.
    """
    if not enabled:
        yield Bar()
        return
    console = console or get_console()
    counter = _Counter(description, total, unit, clock)
    if console.is_terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            _Rate(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            yield _Live(counter, bars)
    else:
        yield _Lines(counter, console, interval)
    if announce or (not console.is_terminal and counter.told):
        console.print(counter.summary(), highlight=False, soft_wrap=True, markup=False)


class _Counter:
    """How much is done, since when."""

    def __init__(self, description: str, total: float | None, unit: str, clock: Callable[[], float]) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = 0.0
        self.told = False
        self._clock, self._start = clock, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def state(self) -> str:
        """`Generating: 32/128 responses (25%), 4.0 responses/s, 0:24 left`"""
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        pace = rate_and_eta(self.done, self.total, self.seconds, self.unit)
        return f"{self.description}: {_amount(self.done, self.total, self.unit)}{share}{pace}"

    def summary(self) -> str:
        """`Generating: 128 responses in 0:32, 4.0 responses/s`"""
        if not self.done:
            return f"{self.description}: done in {duration(self.seconds)}"
        pace = rate_and_eta(self.done, None, self.seconds, self.unit)
        return f"{self.description}: {_amount(self.done, None, self.unit)} in {duration(self.seconds)}{pace}"


class _Lines(Bar):
    """Plain lines for a log file, at most one per interval."""

    def __init__(self, counter: _Counter, console: Console, interval: float) -> None:
        self._counter, self._console, self._interval = counter, console, interval
        self._next = interval

    def advance(self, amount: float = 1) -> None:
        counter = self._counter
        counter.done += amount
        if counter.seconds >= self._next and counter.done != counter.total:
            self._console.print(counter.state(), highlight=False, soft_wrap=True, markup=False)
            counter.told = True
            self._next = counter.seconds + self._interval

    def update(self, *, description: str) -> None:
        self._counter.description = description


class _Live(Bar):
    """A bar of rich's."""

    def __init__(self, counter: _Counter, bars: Progress) -> None:
        self._counter, self._bars = counter, bars
        self._task = bars.add_task(counter.description, total=counter.total, unit=counter.unit)

    def advance(self, amount: float = 1) -> None:
        self._counter.done += amount
        self._bars.advance(self._task, amount)

    def update(self, *, description: str) -> None:
        self._counter.description = description
        self._bars.update(self._task, description=description)


class _Rate(ProgressColumn):
    """Amount, rate and time left of a live bar, worded as in the log file."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if not task.total and not task.completed:
            return Text("")
        pace = rate_and_eta(task.completed, task.total, task.elapsed or 0.0, unit)
        return Text(_amount(task.completed, task.total, unit) + pace)


def rate_and_eta(done: float, total: float | None, seconds: float, unit: str) -> str:
    """`, 4.0 responses/s, 0:24 left`, or less of it while less is known."""
    if not done or seconds <= 0:
        return ""
    rate = done / seconds
    per_second = (
        f", {rate:.1f} {unit or 'steps'}/s"
        if rate >= 1
        else f", {1 / rate:.1f} s/{(unit or 'step').removesuffix('s')}"
    )
    return per_second + (f", {duration((total - done) / rate)} left" if total and done < total else "")


def duration(seconds: float) -> str:
    """`4.2 s` under a minute, `3:07` under an hour, `2:03:07` beyond."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _amount(done: float, total: float | None, unit: str) -> str:
    return f"{_number(done)}{f'/{_number(total)}' if total else ''} {unit}".rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
