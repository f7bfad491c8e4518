"""A frozen reference policy in the trainer's own layout, kept in host memory while it is idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megarl.megatron.policy import Policy


class ReferencePolicy:
    """The weights that the trainer had when this was made (or last replaced): this rank's shards, on the host."""

    def __init__(self, policy: Policy) -> None:
        self._trainer = policy
        pin = policy.platform.kind == "cuda"
        self._weights = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
            for tensor in self._live()
        ]
        self.replace()

    def _live(self) -> list[Tensor]:
        """What a forward pass reads: parameters, and buffers such as a router's bias."""
        return [
            tensor
            for chunk in self._trainer.chunks
            for tensor in (*chunk.parameters(), *chunk.buffers())
            if tensor.is_floating_point()
        ]

    @torch.no_grad()
    def replace(self) -> None:
        """Become the policy of now."""
        for kept, live in zip(self._weights, self._live(), strict=True):
            kept.copy_(live)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the trainer's model is the reference; afterwards it is bit for bit what it was."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """One tensor at a time: no second copy of the model on the device."""
        for kept, live in zip(self._weights, self._live(), strict=True):
            mine = live.clone()
            live.copy_(kept)
            kept.copy_(mine)
