"""A checkpoint on its way to the disk, in megatron-core's `torch_dist` format.

Planning and finishing are done by all ranks together; in between each rank writes its own files, needs no other rank
and may do so in another thread. megatron-core's own asynchronous writer forks a process that holds CUDA and threads,
and starts a manager process beside it, which costs seconds on a CPU.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult


class CheckpointFailed(OSError):
    """CheckpointWrite failed for a reason outside the program: no space, no permission."""


class CheckpointWrite:
    """This rank's part of a checkpoint in `folder`, which exists and is empty. Made by all ranks together.

    state: megatron-core's sharded state. copied: write from copies on the host, made now, so that training may change
    the tensors before they are written. Raises CheckpointFailed when the folder can't be used.
    """

    def __init__(self, folder: Path, state: dict[str, Any], *, copied: bool) -> None:
        self._folder = folder
        self._results: list[WriteResult] = []
        self._problem: Exception | None = None
        sharded, common = save_preprocess(state)
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        self._files = _Files(folder, copied=copied)
        with _disk_problems(folder):
            (_, self._metadata, self._ranks), *_ = save_state_dict_async_plan(
                mcore_to_pyt_state_dict(sharded, False),
                self._files,  # type: ignore[arg-type]
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        self._common = _pickled(common) if dist.get_rank() == 0 else None

    def write(self) -> None:
        """Write this rank's files; once. What goes wrong is raised by `finish`, on every rank."""
        try:
            if self._common is not None:
                (self._folder / COMMON_STATE_FNAME).write_bytes(self._common)
            self._results = self._files.write()
        except Exception as error:
            self._problem = error

    def written(self) -> list[Path]:
        """The files that this rank has written."""
        names = {result.storage_data.relative_path for result in self._results}
        if self._common is not None:
            names.add(COMMON_STATE_FNAME)
        return [self._folder / name for name in sorted(names)]

    def finish(self) -> None:
        """Complete the checkpoint, which every rank has written. Collective.

        Raises CheckpointFailed, on every rank, when any of them could not write a file.
        """
        with _disk_problems(self._folder):
            self._ranks.all_reduce("write", self._outcome, self._complete)

    def _outcome(self) -> list[WriteResult]:
        if self._problem is not None:
            raise self._problem
        return self._results

    def _complete(self, results: list[list[WriteResult]]) -> None:
        """On the main rank."""
        self._files.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


class _Files(FileSystemWriter):
    """This rank's files: one, of what megatron-core's planning gives it."""

    def __init__(self, folder: Path, *, copied: bool) -> None:
        super().__init__(folder, single_file_per_rank=True, thread_count=1)
        if copied:  # copying ahead is for tensors on a device, and would open one in the writing thread
            self.per_thread_copy_ahead = 0
        self._copied = copied

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """The last part of planning (megatron-core's `save_state_dict_async_plan`)."""
        self._plan = plan
        self._source: Any = _Copies(plan, planner) if self._copied else planner

    def write(self) -> list[WriteResult]:
        return self.write_data(self._plan, self._source).value()  # type: ignore[no-any-return]


class _Copies:
    """Stands in for a planner while the files are written: copies of what it had, each given once."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._data = {item.index: _on_host(planner.resolve_data(item)) for item in plan.items}
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._data.pop(item.index)


def _on_host(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    """A copy of a tensor; bytes are one already. From a device into page-locked memory, without waiting."""
    if not isinstance(data, torch.Tensor):
        return data
    copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
    return copy.copy_(data.detach(), non_blocking=True)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@contextmanager
def _disk_problems(folder: Path) -> Iterator[None]:
    """What the operating system refused to any rank becomes a CheckpointFailed."""
    try:
        yield
    except CheckpointException as error:
        if (cause := _refusal_of_the_disk([failure[0] for failure in error.failures.values()])) is None:
            raise
        raise CheckpointFailed(cause.errno, cause.strerror, str(folder)) from error


def _refusal_of_the_disk(causes: Sequence[BaseException]) -> OSError | None:
    """The operating system's word among what the ranks raised. torch's archive writer hides it behind an error of its
    own about positions in the file."""
    for cause in causes:
        if isinstance(cause, OSError):
            return cause
    if any("inline_container" in str(cause) for cause in causes):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None
