"""Where a stage's batches come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megarl.records import Batch


class BatchSource(Protocol):
    """The mini-batches of a stage, step by step, on this replica."""

    def next(self, step: int) -> Sequence[Batch]:
        """Return the mini-batches of step `step`, counted from 1. Collective."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where the source stands, JSON-able, the same on every replica."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError where the data are others."""
        ...
