"""Where a step's routes wait to be replayed: in memory, above a set size in a memory-mapped file, until the step ends.

Each rank keeps the layers it computes, and nothing else: 1 byte for an expert's number up to 256 experts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from megarl.routing.trace import LIVE, RoutingError


class RouteStore:
    """Routes by sample. in_memory_bytes: what is kept in memory; the rest goes to a file in `folder` (None = the
    system's temporary folder), which is deleted on close."""

    def __init__(self, *, in_memory_bytes: int = 1 << 30, folder: Path | None = None) -> None:
        self._kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._limit = in_memory_bytes
        self._folder = folder
        self._file: IO[bytes] | None = None
        self.bytes = self.tokens = self.stale = 0

    def add(self, sample_id: str, experts: np.ndarray, stale: np.ndarray) -> None:
        """Keep a sample's routes. experts: unsigned [tokens - 1, layers, top_k]. stale: bool [tokens - 1], rows that
        must not be replayed."""
        if sample_id in self._kept:
            raise RoutingError(f"sample {sample_id!r}: it has routes already")
        if self.bytes + experts.nbytes > self._limit:
            experts = self._spill(experts)
        self._kept[sample_id] = (experts, stale)
        self.bytes += experts.nbytes
        self.tokens += len(experts)
        self.stale += int(stale.sum())

    def _spill(self, experts: np.ndarray) -> np.ndarray:
        if not experts.size:
            return experts
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix="megarl-routes-")  # noqa: SIM115
        offset = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(experts).tobytes())
        self._file.flush()
        return np.memmap(self._file, dtype=experts.dtype, mode="r", offset=offset, shape=experts.shape)

    def packed(self, sample_ids: Sequence[str], shape: tuple[int, int]) -> Tensor:
        """Return int16 [tokens, layers, top_k] by input position of these samples packed end to end; LIVE where there
        is nothing to replay: a response's last token, stale rows, the one token of a filler (no samples). shape:
        (layers, top_k)."""
        if not sample_ids:
            return torch.full((1, *shape), LIVE, dtype=torch.int16)
        return torch.from_numpy(np.concatenate([self._whole(name) for name in sample_ids]))

    def _whole(self, sample_id: str) -> np.ndarray:
        experts, stale = self._kept[sample_id]
        whole = np.full((len(experts) + 1, *experts.shape[1:]), LIVE, dtype=np.int16)
        whole[:-1] = experts
        whole[:-1][stale] = LIVE
        return whole

    def close(self) -> None:
        """Free everything."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
