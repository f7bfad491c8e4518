"""Weights into SGLang servers: the session, the version, the digests, and the copy that a restarted server gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any, Literal

import httpx
import torch

from megarl.rollout.engine import EngineError, WeightStream
from megarl.rollout.sglang.client import Server, at_once
from megarl.rollout.sglang.layout import FusedDigests, FusedLayout
from megarl.rollout.sglang.transports import Bucket, Transport, make_buckets

BUCKET_BYTES = 128 << 20  # of weights, sent at once


@dataclass(eq=False)
class WeightSync:
    """The weights that the servers hold, of which a copy stays in host memory for a server that is started again.

    dtype: the servers'; weights are cast to it before they are hashed and sent. device: where the servers compute.
    flush: forget cached keys and values after a load. trouble: why the servers must not sample before the next update.
    """

    transport: Transport
    layout: FusedLayout
    dtype: torch.dtype
    device: Literal["cpu", "cuda"]
    flush: bool = True
    version: int = field(default=0, init=False)
    trouble: str | None = field(default=None, init=False)
    _kept: list[Bucket] = field(default_factory=list, init=False)
    _sent: dict[str, str] = field(default_factory=dict, init=False)
    _lock: Any = field(default_factory=RLock, init=False)  # one load at a time

    def update(
        self, servers: Sequence[Server], stream: WeightStream, version: int
    ) -> tuple[dict[str, str], Exception | None]:
        """Load the stream into all servers; return its digests, and what went wrong on the way to the servers.

        The stream is read to its end whatever becomes of the servers: other ranks may take part in making it.
        """
        failure: Exception | None = None

        def trying(action: Callable[[], None]) -> None:
            nonlocal failure
            if failure is None:
                try:
                    action()
                except (EngineError, httpx.HTTPError) as error:
                    failure = error

        with self._lock:
            self.trouble = f"the update to weights of version {version} broke off: update them again"
            digests = FusedDigests(self.layout, self.device)
            kept: list[Bucket] = []
            trying(partial(self._begin, servers))
            tensors = self._cast(stream, digests)
            for bucket in make_buckets(tensors, BUCKET_BYTES, self.layout.together):
                kept.append([(name, tensor.to("cpu", copy=True)) for name, tensor in bucket])
                trying(partial(self.transport.send, servers, bucket))
            self._sent = digests.finish()
            self._kept, self.version = kept, version
            trying(partial(self._end, servers))
            self.trouble = None
            if failure is not None:
                self.trouble = f"weights of version {version} did not reach all servers: {failure!r}"
            return self._sent, failure

    def reload(self, servers: Sequence[Server]) -> None:
        """Give servers the last weights (again), proved by their digests. Raises EngineError if they do not arrive."""
        with self._lock:
            if self.version == 0:
                return
            try:
                self._begin(servers)
                for bucket in self._kept:
                    self.transport.send(servers, bucket)
                self._end(servers)
                arrived = all(server.digests(self.layout) == self._sent for server in servers)
            except httpx.HTTPError as error:
                raise EngineError(
                    f"weights of version {self.version} did not reach all servers: {error!r}"
                ) from error
            if not arrived:
                raise EngineError(f"weights of version {self.version} arrived changed in a restarted server")
            self.trouble = None

    def close(self) -> None:
        with self._lock:
            self.transport.close()

    def _cast(self, stream: WeightStream, digests: FusedDigests) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            cast = tensor.detach().to(self.layout.dtype_of(name, self.dtype))
            digests.add(name, cast)
            yield name, cast

    def _begin(self, servers: Sequence[Server]) -> None:
        def begin(server: Server) -> None:
            try:
                server.post("/begin_weight_update", {})
            except EngineError as error:
                if "already open" not in str(error):
                    raise
                server.post("/end_weight_update", {})  # of an update that failed half-way
                server.post("/begin_weight_update", {})

        at_once(begin, servers)

    def _end(self, servers: Sequence[Server]) -> None:
        def end(server: Server) -> None:
            server.post("/end_weight_update", {})
            server.post(
                "/update_weight_version", {"new_version": str(self.version), "abort_all_requests": False}
            )
            if self.flush:
                server.post("/flush_cache", {})

        at_once(end, servers)
