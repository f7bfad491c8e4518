"""The order in which prompts are drawn: mixed by weight, shuffled by epoch, shared out to replicas, resumable.

All replicas walk one global order together and each takes its block of what they draw, so a step's prompts are the
same set for any number of replicas, and the state names no replica: it is equal on all of them after every draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megarl.errors import UserError
from megarl.records import Prompt

STATE_FORMAT = 2


@dataclass(frozen=True, eq=False)
class Pool:
    """The usable training prompts of one source.

    size: None = endless, any slot has a prompt. weight: share of the prompts, relative to the other pools.
    identity: changes when the prompts do; a stream resumes only on the pools it was saved with.
    verifiers: every verifier that a prompt of the pool may name. prompt: gives the prompt of a slot.
    """

    name: str
    size: int | None
    weight: float
    identity: str
    verifiers: frozenset[str]
    prompt: Callable[[int], Prompt]

    @classmethod
    def of(
        cls, name: str, prompts: Sequence[Prompt], weight: float = 1.0, identity: str | None = None
    ) -> Pool:
        """Make a pool of prompts in memory; the slot is the index. identity: of what the prompts were rendered from;
        None = of their texts."""
        digest = hashlib.blake2b(digest_size=16)
        for p in () if identity else prompts:
            digest.update(f"{p.prompt_id}\0{p.text}\0".encode("utf-8", "surrogatepass"))
        identity = f"{len(prompts)} prompts {identity or digest.hexdigest()}"
        return cls(
            name, len(prompts), weight, identity, frozenset(p.verifier for p in prompts), prompts.__getitem__
        )


@dataclass
class _Cursor:
    """Where one source stands. order: int64 [prompts], the slots of this epoch; derived, not saved."""

    drawn: int = 0
    epoch: int = 0
    offset: int = 0
    order: np.ndarray | None = None


class Dealt(NamedTuple):
    """Prompts that follow each other in the global order. first: the number of the first of them in it, from 0; no
    other draw of the run has their numbers, on any replica."""

    first: int
    prompts: list[Prompt]


class PromptStream:
    """An endless, deterministic stream of prompts; this replica's share of it.

    `deal` must be called with the same counts on all replicas. Then `state_dict()` is equal on all replicas, and a run
    may resume with another number of replicas and see the same prompts.
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
    def drawn(self) -> int:
        """Prompts that were drawn so far, on all replicas."""
        return sum(cursor.drawn for cursor in self._cursors.values())

    def next(self, count: int) -> list[Prompt]:
        """Return this replica's next `count` prompts: its block of the next `count * replicas` of the global order."""
        return self.deal([count] * self._replicas).prompts

    def deal(self, counts: Sequence[int]) -> Dealt:
        """Return this replica's block of the next `sum(counts)` prompts of the global order.

        counts: how many each replica gets, in their order; the same list on all replicas.
        """
        if len(counts) != self._replicas or min(counts) < 0:
            raise ValueError(f"can't deal {list(counts)} prompts to {self._replicas} replicas")
        before, others = self.drawn, sum(counts[: self._replica])
        draws = [self._draw() for _ in range(sum(counts))]
        mine = draws[others : others + counts[self._replica]]
        return Dealt(before + others, [self._pools[name].prompt(slot) for name, slot in mine])

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on, JSON-able, the same on all replicas."""
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
                }
                for name, c in self._cursors.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError if seed, sources or their prompts are others."""
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
            self._cursors[name] = _Cursor(entry["drawn"], entry["epoch"], entry["offset"])

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
        """Return the next (source, slot) of the global order."""
        total = 1 + self.drawn
        # The source that lags its share most: after any number of draws each is within one of its share.
        name = max(self._shares, key=lambda n: self._shares[n] * total - self._cursors[n].drawn)
        cursor, pool = self._cursors[name], self._pools[name]
        cursor.drawn += 1
        if pool.size is None:
            cursor.offset += 1
            return name, cursor.offset - 1
        if cursor.order is None:
            cursor.order = self._order(pool, cursor.epoch)
        if cursor.offset == pool.size:
            cursor.epoch, cursor.offset = cursor.epoch + 1, 0
            cursor.order = self._order(pool, cursor.epoch)
        cursor.offset += 1
        return name, int(cursor.order[cursor.offset - 1])

    def _order(self, pool: Pool, epoch: int) -> np.ndarray:
        """int64 [prompts]: the slots of a finite pool in the order of this epoch."""
        assert pool.size is not None
        if self._shuffle:
            return frozen_permutation(f"{self._seed}/{pool.name}/{epoch}", pool.size)
        return np.arange(pool.size)


def frozen_permutation(name: str, count: int) -> np.ndarray:
    """int64 [count]: an order that depends on nothing but its name.

    Of RandomState, not Generator: its streams are frozen, so a resume survives an upgrade of numpy.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(count)
