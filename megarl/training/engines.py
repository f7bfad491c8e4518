"""A replica's engine, and the sync that gives it the trainer's weights and proves that it holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.errors import UserError
from megarl.megatron.groups import Groups
from megarl.rollout.engine import Engine
from megarl.weights.exchange import stream
from megarl.weights.mapping import NameMap


@dataclass(frozen=True)
class EngineHandle:
    """This rank's place at the engines: an engine on replica leaders, None elsewhere.

    owns: this rank syncs the engine (several replicas may share a server; one of them owns it).
    """

    engine: Engine | None
    owns: bool

    @property
    def client(self) -> Engine:
        """The engine of a replica's leader, which alone samples."""
        assert self.engine is not None, "only replica leaders sample"
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def connect_engine(groups: Groups, make: Callable[[Sequence[str]], Engine], *, shared: bool) -> EngineHandle:
    """Make and start this rank's engine. Collective.

    make(urls): an engine; with URLs, a client of servers that another replica's engine manages. shared: the first
    replica's engine manages the servers of all; else each replica has an engine of its own.

    Raises UserError on every rank when one of them can't start.
    """
    owns = groups.is_leader and (not shared or groups.replica_index == 0)
    engine: Engine | None = None
    urls: Sequence[str] = ()
    problem = None
    if owns:
        try:
            engine = make(())
            engine.start()
            urls = engine.urls() if shared else ()  # type: ignore[attr-defined]
        except UserError as error:
            problem = str(error)
    told = groups.gather_from_everyone((urls, problem))
    if problems := [p for _, p in told if p]:
        if engine is not None:
            engine.close()
        raise UserError(problems[0])
    if groups.is_leader and not owns:
        engine = make(told[0][0])
        engine.start()
    return EngineHandle(engine, owns)


class SyncFailed(RuntimeError):
    """An engine holds other weights than were sent to it."""


def sync_weights(seat: EngineHandle, name_map: NameMap, groups: Groups, version: int) -> dict[str, float]:
    """Give the engines the trainer's weights as `version`, and prove that they hold them. Collective.

    Pause, flush, stream, fingerprint, resume; resumed whatever happens. Returns metrics. Raises SyncFailed naming
    the tensors that differ.
    """
    tensors = size = 0

    def counted():  # type: ignore[no-untyped-def]
        nonlocal tensors, size
        for name, tensor in stream(name_map):
            tensors, size = tensors + 1, size + tensor.nbytes
            yield name, tensor

    if seat.engine is not None and seat.owns:
        engine = seat.engine
        try:
            engine.pause()
            engine.flush()
            sent = engine.update_weights(counted(), version)
            held = engine.fingerprint()
        finally:
            engine.resume()
        if sent != held:
            different = sorted(n for n in sent.keys() | held.keys() if sent.get(n) != held.get(n))
            raise SyncFailed(
                f"after the sync to version {version} the engine holds other weights than were sent: "
                f"{len(different)} of {len(sent)} tensors differ, first {different[0]!r}"
            )
    else:
        for _ in counted():
            pass
    groups.barrier()
    return {"sync/bytes": float(size), "sync/tensors": float(tensors), "sync/version": float(version)}
