"""One line for the person who reads the terminal or the log file."""

from __future__ import annotations

from rich.console import Console

from megarl.errors import printable


def print_status(line: str) -> None:
    """Write `line` on standard error: never wrapped, so that a log file can be searched for a path, and with what a
    terminal would obey spelled out."""
    Console(stderr=True, soft_wrap=True).print(printable(line), markup=False, highlight=False)
