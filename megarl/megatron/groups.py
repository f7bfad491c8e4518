"""Process groups, and the few collectives the rest of megarl needs.

A *replica* is the set of ranks that hold one copy of the policy between them (tensor x pipeline x context). It owns
its prompts and samples: its leader runs the engine and shares what it got with its replica; no rank gathers
everybody's samples.
"""

from __future__ import annotations

import datetime
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megarl.errors import UserError
from megarl.megatron.environment import another_rank_tells, read_place
from megarl.megatron.meeting import RanksMissing, meet
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout

T = TypeVar("T")
SECONDS_TO_MEET = 300.0  # ranks of one start differ by what their imports take


@dataclass(frozen=True)
class Groups:
    """This rank's place, and the groups for objects and counts.

    replica_index of replica_count: the data-parallel coordinate. replica_group: the ranks of this replica.
    peers_group: the ranks with the same place in the other replicas (data parallelism without context).
    """

    rank: int
    world_size: int
    replica_index: int
    replica_count: int
    replica_ranks: tuple[int, ...]
    replica_group: dist.ProcessGroup
    peers_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_main(self) -> bool:
        """The one rank that writes logs and files for all."""
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        """This rank runs its replica's engine."""
        return self.rank == self.replica_ranks[0]

    def share_in_replica(self, value: T | None) -> T:
        """The leader's value, on every rank of the replica (pickled)."""
        if len(self.replica_ranks) == 1:
            return value  # type: ignore[return-value]
        box: list[Any] = [value]
        dist.broadcast_object_list(
            box, src=self.replica_ranks[0], group=self.replica_group, device=self.device
        )
        return box[0]  # type: ignore[no-any-return]

    def gather_in_replica(self, value: T) -> list[T]:
        """Small things only: one value a rank of the replica, in the order of `replica_ranks`, on each of them."""
        values: list[Any] = [None] * len(self.replica_ranks)
        dist.all_gather_object(values, value, group=self.replica_group)
        return values

    def scatter_in_replica(self, values: Sequence[T] | None) -> T:
        """The leader's n-th value on the replica's n-th rank (pickled)."""
        if len(self.replica_ranks) == 1:
            return values[0]  # type: ignore[index]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, src=self.replica_ranks[0], group=self.replica_group)  # type: ignore[arg-type]
        return box[0]  # type: ignore[no-any-return]

    def share_from_main(self, value: T | None) -> T:
        """Rank 0's value, everywhere (pickled)."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]  # type: ignore[no-any-return]

    def share_from_last_stage(self, value: T | None) -> T:
        """The last pipeline stage's value, on every stage (pickled)."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return value  # type: ignore[return-value]
        box: list[Any] = [value]
        dist.broadcast_object_list(
            box,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
            device=self.device,
        )
        return box[0]  # type: ignore[no-any-return]

    def gather_from_replicas(self, value: T) -> list[T]:
        """Small things only (counts, metrics): one value a replica, in replica order, on every rank."""
        values: list[Any] = [None] * self.replica_count
        dist.all_gather_object(values, value, group=self.peers_group)
        return values

    def gather_from_everyone(self, value: T) -> list[T]:
        """Small things only: one value a rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Over data parallelism, from whichever device; every rank of a replica holds the same values."""
        total = tensor.to(self.device)
        dist.all_reduce(total, group=self.peers_group)
        return total.to(tensor.device)

    def max_over_replicas(self, number: int) -> int:
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.peers_group)
        return int(tensor)

    def largest(self, number: int) -> int:
        """The largest of every rank's numbers."""
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def everyone(self, flag: bool) -> bool:
        """Whether it is so on every rank."""
        tensor = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return bool(tensor)

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Do it on the main rank, which gets what it returns; its UserError is raised on every rank. Collective."""
        done, problem = None, None
        if self.is_main:
            try:
                done = action()
            except UserError as error:
                problem = (type(error), str(error))
        if (problem := self.share_from_main(problem)) is not None:
            kind, message = problem
            raise kind(message)
        return done

    def barrier(self) -> None:
        dist.barrier()


def initialize(layout: Layout, platform: Platform, *, seed: int, timeout_seconds: int = 1800) -> Groups:
    """Join the world (torchrun's variables; alone without them) and build megatron-core's groups. Once a process.

    Raises UserError when the layout does not divide the world size, and RanksMissing when the ranks do not meet.
    """
    platform.enter()
    if not dist.is_initialized():
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        place = read_place()
        assert place is not None
        if problem := layout.problem(place.world_size):
            raise UserError(f"parallel: {problem}; change parallel.* or the number of ranks")
        timeout = datetime.timedelta(seconds=timeout_seconds)
        seconds = min(SECONDS_TO_MEET, timeout_seconds)
        dist.init_process_group(
            platform.backend,
            store=meet(place, seconds=seconds, timeout=timeout) if place.world_size > 1 else dist.HashStore(),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=platform.device if platform.kind == "cuda" else None,
        )
    if problem := layout.problem(dist.get_world_size()):
        raise UserError(f"parallel: {problem}; change parallel.* or the number of ranks")
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_shards,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return _find_groups(platform)


def _find_groups(platform: Platform) -> Groups:
    index = parallel_state.get_data_parallel_rank(with_context_parallel=False)
    count = parallel_state.get_data_parallel_world_size(with_context_parallel=False)
    indices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(indices, index)
    replicas = [[rank for rank, i in enumerate(indices) if i == replica] for replica in range(count)]
    groups = [dist.new_group(ranks) for ranks in replicas]
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        replica_index=index,
        replica_count=count,
        replica_ranks=tuple(replicas[index]),
        replica_group=groups[index],
        peers_group=parallel_state.get_data_parallel_group(with_context_parallel=False),
        device=platform.device,
    )


@contextmanager
def report_error_once() -> Iterator[None]:
    """Most of a user's mistakes are met by every rank: the first to raise one tells it, the others are silent. A rank
    that only misses another says so in one line: the other's words matter."""
    try:
        yield
    except RuntimeError as error:
        if (
            lost := re.match(r"\[[^\]]*gloo/transport[^\]]*\] (.+?)(\. This is|$)", str(error), re.DOTALL)
        ) is None:
            raise
        raise SystemExit(f"megarl: rank {os.environ['RANK']} lost another rank: {lost[1]}") from None
    except UserError as error:
        error.silent = not isinstance(error, RanksMissing) and not _first_to_say(str(error))
        raise


def _first_to_say(message: str) -> bool:
    """Whether no other rank has said this yet."""
    if not dist.is_initialized():
        return not another_rank_tells()
    key = f"megarl/said/{zlib.crc32(message.encode())}"
    return dist.distributed_c10d._get_default_store().add(key, 1) == 1  # type: ignore[no-any-return]


def destroy_groups() -> None:
    """Leave the world. Safe to call twice."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
