"""Time and memory of variants of the same work, measured in turns."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.monitor.progress import progress


@dataclass(frozen=True)
class Timing:
    """seconds of each turn; ratios to the first variant's same turn."""

    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return f"{statistics.median(self.seconds):9.4f} s   x {self.ratio:.3f} (quartiles {low:.3f} to {high:.3f})"


def in_turns(variants: Mapping[str, Callable[[], Any]], *, turns: int, warm_up: int = 1) -> dict[str, Timing]:
    """Run every variant once a turn, so that whatever else the machine does falls on all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with progress("Measuring", turns + warm_up, unit="turns") as bar:
        for turn in range(-warm_up, turns):
            for name, work in variants.items():
                start = time.perf_counter()
                work()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - start)
            bar.advance()
    first = next(iter(seconds.values()))
    return {
        name: Timing(tuple(own), tuple(a / b for a, b in zip(own, first, strict=True)))
        for name, own in seconds.items()
    }


class PeakMemory(TorchDispatchMode):
    """`peak`: bytes of the tensors made under it that are alive together at most; works on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self._alive:
            self._alive[storage.data_ptr()] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.data_ptr())

    def _freed(self, pointer: int) -> None:
        self.now -= self._alive.pop(pointer, 0)
