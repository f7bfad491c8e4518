"""The order in which prompts are drawn: mixed by weight, shuffled by epoch, shared out to replicas,
resumable.

All replicas walk one global order and each takes its block of every draw, so a step's prompts are the same
set for
any number of replicas, and the state names no replica: it is equal on all of them after every step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from megarl.errors import UserError
from megarl.records import Prompt

STATE_FORMAT = 1


class Pool(Protocol):
    """The usable training prompts of one source. size None: endless, any slot has a prompt.

    identity: changes when the prompts do; a stream resumes only on the pools it was saved with.
    verifiers: every verifier that a prompt of the pool may name.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def weight(self) -> float: ...

    @property
    def identity(self) -> str: ...

    @property
    def verifiers(self) -> frozenset[str]: ...

    def prompt(self, slot: int) -> Prompt: ...


@dataclass(frozen=True, eq=False)
class FinitePool:
    """Prompts in memory; the slot is the index."""

    name: str
    prompts: Sequence[Prompt]
    weight: float = 1.0

    @property
    def size(self) -> int:
        return len(self.prompts)

    @cached_property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for p in self.prompts:
            digest.update(f"{p.prompt_id}\0{p.text}\0".encode("utf-8", "surrogatepass"))
        return f"{len(self.prompts)} prompts {digest.hexdigest()}"

    @property
    def verifiers(self) -> frozenset[str]:
        return frozenset(p.verifier for p in self.prompts)

    def prompt(self, slot: int) -> Prompt:
        return self.prompts[slot]


@dataclass
class _Cursor:
    """Where one source stands. left_out: not drawn in this epoch; solved: will be left out of the next."""

    drawn: int = 0
    epoch: int = 0
    offset: int = 0
    left_out: set[str] = field(default_factory=set)
    solved: set[str] = field(default_factory=set)
    order: np.ndarray | None = None  # int64 [slots of this epoch]; derived, not saved


class PromptStream:
    """An endless, deterministic stream of prompts; this replica's share of it.

    `next(count)` must be called with the same count on all replicas, and `skip` with the same ids before
    the next draw (gather them over the data-parallel group). Then `state_dict()` is equal on all replicas,
    which is worth asserting, and a run may resume with another number of replicas and see the same prompts.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        seed: int = 0,
        shuffle: bool = True,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} of {replicas}")
        for pool in pools:
            if pool.size == 0:
                raise UserError(f"source {pool.name!r} has no prompt left to train on: see its counts.")
        if not pools:
            raise UserError("there is no source to train on.")
        self._pools = {pool.name: pool for pool in pools}
        self._cursors = {name: _Cursor() for name in self._pools}
        total = sum(pool.weight for pool in pools)
        self._shares = {pool.name: pool.weight / total for pool in pools}
        self._seed, self._shuffle = seed, shuffle
        self._replica, self._replicas = replica, replicas

    @property
    def epochs(self) -> dict[str, int]:
        """Finished passes over each source (0 for an endless one)."""
        return {name: c.epoch for name, c in self._cursors.items()}

    @property
    def left_out(self) -> dict[str, int]:
        """Prompts of each source that this epoch leaves out because the last one solved them."""
        return {name: len(c.left_out) for name, c in self._cursors.items()}

    def next(self, count: int) -> list[Prompt]:
        """This replica's next `count` prompts: its block of the next `count * replicas` of the global
        order."""
        if count < 0:
            raise ValueError(f"can't draw {count} prompts")
        draws = [self._draw() for _ in range(count * self._replicas)]
        mine = draws[self._replica * count : (self._replica + 1) * count]
        return [self._pools[name].prompt(slot) for name, slot in mine]

    def skip(self, prompt_ids: Iterable[str]) -> None:
        """Leave these prompts out of their source's next epoch (SRPO's history resampling, arXiv:2504.14286).

        Meant for prompts that all responses solved. A prompt left out of one epoch is back in the one
        after. An epoch that would be empty is run in full. Ids of endless sources are ignored: they never
        come again.
        Raises ValueError for an id of no source.
        """
        for prompt_id in prompt_ids:
            name = prompt_id.partition("/")[0]  # a source's name holds no slash, a row's file may
            if name not in self._pools:
                raise ValueError(
                    f"prompt {prompt_id!r} is of no source of this stream ({', '.join(self._pools)})"
                )
            if self._pools[name].size is not None:
                self._cursors[name].solved.add(prompt_id)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, JSON-able, the same on all replicas."""
        return {
            "format": STATE_FORMAT,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": {
                name: {
                    "identity": self._pools[name].identity,
                    "drawn": c.drawn,
                    "epoch": c.epoch,
                    "offset": c.offset,
                    "left_out": sorted(c.left_out),
                    "solved": sorted(c.solved),
                }
                for name, c in self._cursors.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError if seed, sources or their prompts are
        others."""
        if state.get("format") != STATE_FORMAT:
            raise UserError(f"prompt stream: a state of format {state.get('format')!r} can't be read here.")
        saved: Mapping[str, Any] = state["sources"]
        change = self._change_since(state, saved)
        if change:
            raise UserError(
                f"the data are not those of the checkpoint: {change}. Restore them, or start a new run from "
                "the checkpoint's weights."
            )
        for name, entry in saved.items():
            self._cursors[name] = _Cursor(
                drawn=entry["drawn"],
                epoch=entry["epoch"],
                offset=entry["offset"],
                left_out=set(entry["left_out"]),
                solved=set(entry["solved"]),
            )

    def _change_since(self, state: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            return f"seed {state['seed']}, shuffle {state['shuffle']} then; {self._seed}, {self._shuffle} now"
        if saved.keys() != self._pools.keys():
            return f"sources {', '.join(saved)} then; {', '.join(self._pools)} now"
        for name, pool in self._pools.items():
            if saved[name]["identity"] != pool.identity:
                return f"source {name!r} was {saved[name]['identity']} then and is {pool.identity} now"
        return None

    def _draw(self) -> tuple[str, int]:
        """The next (source, slot) of the global order."""
        total = 1 + sum(c.drawn for c in self._cursors.values())
        # The source that lags its share most: after any number of draws each is within one of its share.
        name = max(self._shares, key=lambda n: self._shares[n] * total - self._cursors[n].drawn)
        cursor, pool = self._cursors[name], self._pools[name]
        cursor.drawn += 1
        if pool.size is None:
            cursor.offset += 1
            return name, cursor.offset - 1
        if cursor.order is None:
            cursor.order = self._order(pool, cursor)
        if cursor.offset == len(cursor.order):
            cursor.epoch, cursor.offset = cursor.epoch + 1, 0
            cursor.left_out, cursor.solved = cursor.solved, set()
            cursor.order = self._order(pool, cursor)
        cursor.offset += 1
        return name, int(cursor.order[cursor.offset - 1])

    def _order(self, pool: Pool, cursor: _Cursor) -> np.ndarray:
        """Slots of the cursor's epoch, int64 [prompts not left out]."""
        assert pool.size is not None
        order = np.arange(pool.size)
        if self._shuffle:
            digest = hashlib.blake2b(
                f"{self._seed}/{pool.name}/{cursor.epoch}".encode(), digest_size=16
            ).digest()
            # RandomState, not Generator: its streams are frozen, so a resume survives an upgrade of numpy.
            order = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(pool.size)
        if cursor.left_out:
            kept = np.fromiter(
                (pool.prompt(int(slot)).prompt_id not in cursor.left_out for slot in order), bool, len(order)
            )
            if kept.any():
                return order[kept]
            cursor.left_out = set()
        return order
