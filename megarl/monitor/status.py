"""One line for the person who reads the terminal or the log file."""

from __future__ import annotations

from rich.console import Console


def print_status(line: str) -> None:
    """Write `line` on standard error as it is: never wrapped, so that a log file can be searched for a path."""
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)
