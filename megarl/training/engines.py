"""Engines under a run's ranks: each replica's leader has one, and all ranks take part in giving it weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megarl.config.schema import Config
from megarl.errors import UserError
from megarl.megatron.architecture import Architecture
from megarl.megatron.groups import Groups
from megarl.rollout.declaration import EngineContext, EngineSettings
from megarl.rollout.engine import Engine, WeightStream
from megarl.rollout.sync import give_weights


def check_engine(config: Config, architecture: Architecture) -> None:
    """Raise UserError for an engine that cannot hold the model, or that this machine cannot start."""
    device = engine_device(config)
    config.engine.check(architecture, gpus=torch.cuda.device_count() if device == "cuda" else 0)
    config.engine.check_model(Path(str(config.model.path)), device=device)


def engine_device(config: Config) -> Literal["cpu", "cuda"]:
    """Return where the run's engine computes: on this machine, unless the configuration is for one with GPUs."""
    if config.platform == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.platform


def engine_context(
    config: Config, architecture: Architecture, *, model_path: Path, folder: Path, dtype: torch.dtype
) -> EngineContext:
    """Return what the run's engine is made for. model_path: the Hugging Face folder that the engine loads; folder: the
    run's; dtype: the trainer's."""
    spread = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < int(os.environ.get("WORLD_SIZE", 1))
    return EngineContext(
        model_path,
        architecture,
        folder,
        dtype,
        device=engine_device(config),
        seed=config.seed,
        # Shared servers are rank 0's, on the machine that the others know as MASTER_ADDR.
        address=os.environ["MASTER_ADDR"] if spread else None,
    )


@dataclass(frozen=True)
class EngineHandle:
    """This rank's engine: one on replica leaders, None on other ranks.

    owns: this rank gives the engine its weights (of several replicas that share servers, one does).
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


def connect_engine(groups: Groups, settings: EngineSettings, context: EngineContext) -> EngineHandle:
    """Make and start this rank's engine, or connect it to the servers that the first replica's engine started, where
    the settings say that these are shared. Collective.

    Raises UserError on every rank when one of them can't start.
    """
    owns = groups.is_leader and (not settings.shared or groups.replica_index == 0)
    engine: Engine | None = None
    urls: tuple[str, ...] = ()
    problem = None
    if owns:
        try:
            engine = settings.make(context)
            engine.start()
            urls = engine.urls()
        except UserError as error:
            problem = str(error)
    everywhere = groups.gather_from_everyone((urls, problem))
    if problems := [p for _, p in everywhere if p]:
        if engine is not None:
            engine.close()
        raise UserError(problems[0])
    if groups.is_leader and not owns:
        engine = settings.make(context, everywhere[0][0])
        engine.start()
    return EngineHandle(engine, owns)


def sync_weights(
    handle: EngineHandle, tensors: WeightStream, groups: Groups, *, version: int
) -> dict[str, float]:
    """Give the engines the trainer's weights as `version`, and prove that they hold them; return metrics. Collective.

    tensors: whole tensors by Hugging Face name (`weights.exchange.iter_hf_tensors`); every rank takes part in making
    them, so every rank goes through them. Raises SyncFailed naming the tensors that differ.
    """
    count = size = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count, size
        for name, tensor in tensors:
            count, size = count + 1, size + tensor.nbytes
            yield name, tensor

    if handle.engine is not None and handle.owns:
        give_weights(handle.engine, counted(), version)
    else:
        for _ in counted():
            pass
    groups.barrier()
    return {"sync/bytes": float(size), "sync/tensors": float(count), "sync/version": float(version)}
