"""What an engine declares in one class: its settings, whether it can hold a policy, and how it is made. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megarl.settings import Section

if TYPE_CHECKING:
    import torch

    from megarl.megatron.architecture import Architecture
    from megarl.rollout.engine import Engine


@dataclass(frozen=True)
class EngineContext:
    """What an engine is made for: the policy and the run.

    model_path: the Hugging Face folder whose config, tokenizer and first weights the engine loads.
    architecture: what that model is.
    folder: the run's folder, for the engine's own files.
    dtype: the trainer's parameters. device: where an engine in this process, or its servers, compute.
    seed: starts the engine's own random numbers.
    address: this machine as ranks on other machines know it; None = all ranks are on this one.
    """

    model_path: Path
    architecture: Architecture
    folder: Path
    dtype: torch.dtype
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0
    address: str | None = None


class EngineSettings(Section):
    """The `engine` section of a configuration. Each kind of engine derives its own (see `registry`).

    shared: one engine's servers serve all data-parallel replicas. The first replica's leader starts it, and the other
    leaders' engines are made with its `Engine.urls`. Otherwise each leader's engine starts by itself.
    """

    shared: ClassVar[bool] = False

    kind: str = Field(description="One of megarl's engines, or your own: package.module:SettingsClass.")

    def check(self, architecture: Architecture, *, gpus: int) -> None:
        """Raise UserError for an engine that cannot hold the model, or that this machine cannot start.

        gpus: of this machine that the run may use; 0 = it computes on CPUs.
        """

    def check_model(self, folder: Path, *, device: Literal["cpu", "cuda"]) -> None:
        """Raise UserError for a Hugging Face folder whose model the engine would not sample as megarl trains it.

        device: where the engine would compute. Only the folder's config.json need be read."""

    @abstractmethod
    def make(self, context: EngineContext, urls: Sequence[str] = ()) -> Engine:
        """Return an engine that is not started. urls: servers of another replica's engine, to be used in place of own
        ones. What the engine needs is imported here, so that reading a configuration stays quick."""
