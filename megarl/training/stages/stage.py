"""A stage of a run: what the loop in `training/train.py` asks of every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megarl.megatron.critic import Critic
from megarl.megatron.reference import ReferencePolicy
from megarl.training.sources import BatchSource


@dataclass
class AuxiliaryModels:
    """What some algorithms need beside the policy; kept in the checkpoints."""

    reference: ReferencePolicy | None = None
    critic: Critic | None = None


class Stage(ABC):
    """A stage, opened on this rank. All ranks call everything here together.

    title: for progress bars. syncs_engine: the engine gets the policy's weights before the first step and in each, and
    held-out accuracy is measured before the first step.
    """

    title: ClassVar[str]
    syncs_engine: ClassVar[bool]

    def __init__(self, name: str, steps: int, source: BatchSource, models: AuxiliaryModels) -> None:
        """name: in the run. source: where batches come from, saved with the run. models: made by `prepare`."""
        self.name, self.steps, self.source, self.models = name, steps, source, models

    @abstractmethod
    def prepare(self) -> None:
        """Give the policy this stage's optimizer, and make the models beside it from the policy of now."""

    @abstractmethod
    def step(self, step: int, policy_version: int) -> dict[str, float]:
        """Learn one step, counted from 1, and return its metrics. policy_version: of the weights before it; a stage
        that syncs the engine gives it `policy_version + 1`."""

    def headline(self, metrics: Mapping[str, float]) -> str:
        """Return the progress bar's words after a step that was logged."""
        return self.title

    def is_logged(self, step: int) -> bool:
        """Whether a step's metrics go to the sinks."""
        return True

    @abstractmethod
    def is_evaluated(self, step: int) -> bool:
        """Whether held-out accuracy is measured after a step."""

    @abstractmethod
    def is_saved(self, step: int) -> bool:
        """Whether a checkpoint is written after a step."""
