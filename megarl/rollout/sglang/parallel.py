"""The same blocking call to several servers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 16


def at_once(action: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do `action` to every item, in threads of this call; wait for all, then raise the first failure.

    Threads are not shared between calls, so that one call may be made from within another.
    """
    if len(items) <= 1:
        return [action(item) for item in items]
    with ThreadPoolExecutor(min(len(items), MOST_THREADS)) as threads:
        done = [threads.submit(action, item) for item in items]
    return [future.result() for future in done]
