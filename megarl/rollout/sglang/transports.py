"""How whole tensors get into SGLang servers: over HTTP, or by broadcast in a process group of their own.

| transport | way | for |
|---|---|---|
| `http` | pickled tensors in base64, a request for each bucket and server | CPUs, small models |
| `broadcast` | gloo or NCCL: rank 0 is here, every rank of every server is another | clusters |

Both run between `/begin_weight_update` and `/end_weight_update`, in buckets of bounded size. NCCL needs this process
and the servers on different GPUs, and the same NCCL version in both environments.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import httpx
import torch
import torch.distributed as dist

from megarl.rollout.engine import EngineError, WeightStream
from megarl.rollout.sglang.client import Server, at_once
from megarl.rollout.sglang.process import free_port

TIMEOUT = 300.0  # seconds for making a process group, and for one broadcast

Result = TypeVar("Result")

Bucket = list[tuple[str, torch.Tensor]]


class Transport(Protocol):
    """Loads buckets into servers."""

    def send(self, servers: Sequence[Server], bucket: Bucket) -> None:
        """Load the bucket's tensors into every server. Raises EngineError; httpx errors pass through."""

    def close(self) -> None:
        """Give back what connects to the servers. The next `send` connects anew. Idempotent."""


def make_buckets(
    stream: WeightStream,
    most_bytes: int,
    together: Callable[[str], tuple[str, int] | None] = lambda name: None,
) -> Iterator[Bucket]:
    """Yield the tensors in buckets of at most `most_bytes` (a larger one is alone in its bucket), in their order.

    together: the group that a name belongs to, and of how many tensors: these stay in one bucket, and come when the
    last of them has come. None = it may be anywhere.
    """
    bucket: Bucket = []
    size = 0
    for tensors in _groups(stream, together):
        more = sum(tensor.nbytes for _, tensor in tensors)
        if bucket and size + more > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket += tensors
        size += more
    if bucket:
        yield bucket


def _groups(stream: WeightStream, together: Callable[[str], tuple[str, int] | None]) -> Iterator[Bucket]:
    held: dict[str, Bucket] = {}
    for name, tensor in stream:
        group, count = together(name) or (name, 1)
        tensors = held.setdefault(group, [])
        tensors.append((name, tensor))
        if len(tensors) == count:
            yield held.pop(group)
    yield from held.values()  # of a stream that broke off, which whoever counts its tensors tells


class HttpTransport:
    """`/update_weights_from_tensor`: plain pickles, never torch's shared-memory handles of another process."""

    def __init__(self, tp_size: int) -> None:
        self._tp_size = tp_size

    def send(self, servers: Sequence[Server], bucket: Bucket) -> None:
        # Compact storages: a view would be pickled with all of the tensor that it looks into.
        plain = [(name, tensor.cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in bucket]
        encoded = base64.b64encode(pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)).decode()
        body = {"serialized_named_tensors": [encoded] * self._tp_size, "flush_cache": False}
        at_once(lambda server: server.post("/update_weights_from_tensor", body), servers)

    def close(self) -> None:
        pass


class BroadcastTransport:
    """`/update_weights_from_distributed`: rank 0 of a group with the ranks of all servers.

    backend: gloo or nccl. address: of this machine, as the servers see it.
    """

    def __init__(self, tp_size: int, *, backend: str, address: str) -> None:
        self._tp_size = tp_size
        self._backend = backend
        self._address = address
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._members: list[Server] = []

    def send(self, servers: Sequence[Server], bucket: Bucket) -> None:
        if self._group is None or list(servers) != self._members:
            self.close()
            self._connect(servers)
        device = "cuda" if self._backend == "nccl" else "cpu"
        flat = torch.cat([tensor.to(device).reshape(-1).view(torch.uint8) for _, tensor in bucket])
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        bodies = [(server, body) for server in servers]
        try:
            self._while_posting(
                "/update_weights_from_distributed", bodies, lambda answers: self._broadcast(flat, answers)
            )
        except BaseException:
            self.close()  # a broken group cannot be used again
            raise

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for server in self._members:
            # It may be dead, which is why we are here.
            with contextlib.suppress(EngineError, httpx.HTTPError):
                server.post("/destroy_weights_update_group", {"group_name": self._group_name})
        dist.destroy_process_group(group)

    def _connect(self, servers: Sequence[Server]) -> None:
        port = free_port("")
        self._group_name = f"megarl_weights_{port}"
        self._members = list(servers)
        world = 1 + len(servers) * self._tp_size
        rendezvous = {
            "master_address": self._address,
            "master_port": port,
            "world_size": world,
            "group_name": self._group_name,
            "backend": self._backend,
        }
        bodies = [
            (server, {**rendezvous, "rank_offset": 1 + n * self._tp_size}) for n, server in enumerate(servers)
        ]
        timeout = timedelta(seconds=TIMEOUT)
        self._group = self._while_posting(
            "/init_weights_update_group",
            bodies,
            lambda answers: make_group(self._group_name, self._backend, self._address, port, world, timeout),
        )

    def _broadcast(self, tensor: torch.Tensor, answers: Sequence[Future[Any]]) -> None:
        """Send one tensor. A server that refuses to receive it ends the wait at once, a silent one after TIMEOUT."""
        assert self._group is not None
        work = self._group.broadcast([tensor], dist.BroadcastOptions())
        deadline = time.monotonic() + TIMEOUT
        while not work.is_completed():
            for answer in answers:
                if answer.done() and answer.exception():
                    answer.result()
            if time.monotonic() > deadline:
                raise EngineError(f"weight broadcast: no end after {TIMEOUT:.0f} s")
            time.sleep(0.0005)
        work.wait()

    @staticmethod
    def _while_posting(
        path: str,
        bodies: Sequence[tuple[Server, dict[str, Any]]],
        action: Callable[[list[Future[Any]]], Result],
    ) -> Result:
        """Post to each server and meanwhile do our own part of what they all take part in."""
        threads = ThreadPoolExecutor(len(bodies))
        try:
            answers = [threads.submit(server.post, path, body) for server, body in bodies]
            result = action(answers)
            for answer in answers:
                answer.result()
            return result
        finally:
            threads.shutdown(wait=False)


def make_group(
    name: str, backend: str, address: str, port: int, world: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group beside torch's default one, in which this process is rank 0 and hosts the store.

    SGLang joins it by `sglang.srt.utils.common.init_custom_process_group`, which calls the same torch helper
    with the same prefixes; torch has no public way to make a group of processes that share no default group.
    """
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper

    store = dist.TCPStore(address, port, world, is_master=True, timeout=timeout, wait_for_workers=False)
    make: Any = _new_process_group_helper  # its group name is typed in newer torch versions only
    group, _ = make(
        world, 0, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group
