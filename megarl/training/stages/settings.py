"""Settings of the kinds of stages, and how each is opened. Reading a configuration imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megarl.data.settings import DemonstrationSettings
from megarl.megatron.settings import OptimizerSettings
from megarl.settings import Section

if TYPE_CHECKING:
    from megarl.training.resolve import StagePlan
    from megarl.training.run import Run
    from megarl.training.stages.stage import Stage


class StageSettings(Section):
    """What every kind of stage has: a number of steps, and a way to be opened. A kind of your own derives from it."""

    steps: int = Field(default=0, ge=0, description="Steps of the stage.")

    @abstractmethod
    def open(self, run: Run, plan: StagePlan) -> Stage:
        """Open the stage on this rank, taking from the run what it uses. What it needs is imported here. Collective."""


class SftSettings(StageSettings):
    """Stage 1: supervised fine-tuning on demonstrations (cold start). 0 steps = no such stage."""

    steps: int = Field(default=0, ge=0, description="Optimizer steps of the cold start.")
    batch_size: int = Field(default=128, ge=1, description="Demonstrations per step, over all replicas.")
    demonstrations: DemonstrationSettings | None = Field(
        default=None, description="Files to learn from: a `messages` or a response column."
    )
    optimizer: OptimizerSettings = Field(
        default_factory=lambda: OptimizerSettings(lr=1e-3, schedule="cosine"),
        description="Optimizer settings of the cold start.",
    )
    log_every: int = Field(default=20, ge=1, description="Steps between two lines of metrics.")

    def open(self, run: Run, plan: StagePlan) -> Stage:
        from megarl.training.stages.sft import open_stage

        return open_stage(run, plan, self)


class ReferenceSettings(Section):
    """The frozen policy that a KL penalty holds the policy to, for algorithms with one."""

    replace_every: int = Field(
        default=0,
        ge=0,
        description="RL steps after which the reference becomes the policy of that step; 0 = never.",
    )


class CriticSettings(Section):
    """The value model of `ppo`: the policy's backbone of the start with a value head."""

    optimizer: OptimizerSettings = Field(
        default_factory=OptimizerSettings, description="Optimizer settings of the critic."
    )


class RlSettings(StageSettings):
    """Stage 2: reinforcement learning. A step samples, scores, trains on all of it, and syncs the engine."""

    steps: int = Field(default=100, ge=0, description="Steps of sampling and learning.")
    prompts_per_step: int = Field(default=32, ge=1, description="Prompts per step, over all replicas.")
    group_size: int = Field(default=8, ge=1, description="Responses per prompt.")
    minibatches: int | None = Field(
        default=None, ge=1, description="Optimizer steps per rollout; None = the algorithm's own number."
    )
    sampling_rounds: int = Field(
        default=8,
        ge=1,
        description="With dynamic sampling, the most rounds a step may take to fill up with groups that differ in "
        "reward; then it trains on those it has.",
    )
    compare_routes: bool = Field(
        default=False,
        description="Ask the engine for its routes and report how the trainer's differ, also where none is replayed.",
    )
    audit_every: int = Field(
        default=20,
        ge=0,
        description="RL steps between two audits; an audit compares the engine's log-probabilities with those of a "
        "forward pass of its own, with live routing; 0 = none.",
    )
    audit_responses: int = Field(default=32, ge=1, description="Responses in an audit, over all replicas.")
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="Most weight versions that a response's oldest token may be behind the policy.",
    )
    stale_responses: Literal["stop", "drop", "correct"] = Field(
        default="stop",
        description="What older responses do: stop the run, be dropped, or be trained on, which takes "
        "algorithm.correction. They are counted.",
    )
    routes_in_memory_mib: int = Field(
        default=1024,
        ge=0,
        description="Host memory in MiB for a step's routes on each rank; further routes go to a file.",
    )
    optimizer: OptimizerSettings = Field(
        default_factory=OptimizerSettings, description="Optimizer settings of the RL stage."
    )
    reference: ReferenceSettings = Field(
        default_factory=ReferenceSettings,
        description="The reference policy, for algorithms with a KL penalty.",
    )
    critic: CriticSettings = Field(
        default_factory=CriticSettings, description="The value model, for algorithms with a critic."
    )

    def open(self, run: Run, plan: StagePlan) -> Stage:
        from megarl.training.stages.rl import open_stage

        return open_stage(run, plan, self)
