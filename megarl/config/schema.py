"""The whole configuration of a run, typed.

Sections that belong to one room sit in that room's `settings.py` (plain pydantic, no torch) and are composed here.
Rules between sections are in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, field_validator

from megarl.data.settings import DataSettings
from megarl.megatron.settings import Layout, ModelSettings
from megarl.monitor.settings import AlarmSettings, LogSettings
from megarl.rewards.settings import RewardSettings
from megarl.rollout.declaration import EngineSettings
from megarl.rollout.embedded.settings import EmbeddedSettings
from megarl.rollout.registry import AnyEngineSettings, is_own, read_own_engine
from megarl.rollout.settings import SamplingSettings
from megarl.settings import HomePath, Section
from megarl.training.stages.settings import RlSettings, SftSettings


class Launch(Section):
    """How `megarl train` starts its ranks when it is not already under torchrun."""

    ranks: int | None = Field(
        default=None,
        ge=1,
        description="Ranks on this machine; None = one for each GPU, on a CPU the fewest that the layout allows.",
    )
    threads_per_rank: int = Field(default=1, ge=1, description="CPU threads of each rank (OMP_NUM_THREADS).")
    timeout_minutes: float = Field(
        default=30, gt=0, description="Minutes that a collective may wait for all ranks."
    )


class PolicySettings(ModelSettings):
    """The policy: the checkpoint and tokenizer that it starts from, and how it is run."""

    path: HomePath | None = Field(
        default=None, description="Hugging Face checkpoint folder to start from; required."
    )
    tokenizer: HomePath | None = Field(
        default=None, description="Tokenizer folder; None = the one in model.path."
    )
    chat_template: HomePath | None = Field(
        default=None, description="Jinja file to use in place of the tokenizer's own chat template."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, such as {enable_thinking: false}."
    )


class Evaluation(Section):
    """Greedy answers to held-out prompts (`data.heldout`, `data.evaluations`)."""

    every: int = Field(default=10, ge=0, description="RL steps between evaluations; 0 = only first and last.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Longest answer in tokens; None = sampling.max_new_tokens."
    )


def _word_of_switch(value: Any) -> Any:
    """YAML reads the bare words `on` and `off` as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Checkpoint(Section):
    """What is saved of a run, and when."""

    every: int = Field(default=20, ge=0, description="RL steps between checkpoints; 0 = only the last.")
    sft_every: int = Field(default=0, ge=0, description="Cold-start steps between checkpoints; 0 = none.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept, beside the best.")
    asynchronous: Annotated[Literal["auto", "on", "off"], BeforeValidator(_word_of_switch)] = Field(
        default="auto",
        description="Write while training goes on, from a copy in host memory, as large as a rank's weights and "
        "optimizer state; auto = on with CUDA. The last checkpoint is always waited for.",
    )
    resume: bool = Field(default=True, description="Go on from the newest good checkpoint in the run folder.")
    export_hf: bool = Field(default=True, description="Write a Hugging Face checkpoint at the end.")


class Batching(Section):
    """How sequences become micro-batches."""

    micro_batch_tokens: int = Field(default=4096, ge=1, description="Most tokens of a packed micro-batch.")
    logprob_chunk: int = Field(default=1024, ge=1, description="Tokens whose logits exist at one time.")


class Config(Section):
    """A run."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$", description="Name of the run.")
    folder: HomePath | None = Field(default=None, description="Run folder; None = runs/<name>.")
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of everything that has no seed of its own."
    )
    platform: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the run computes; auto = CUDA where there is a GPU, else the CPU."
    )
    launch: Launch = Field(default_factory=Launch, description="Ranks on this machine.")
    model: PolicySettings = Field(default_factory=PolicySettings, description="The policy.")
    parallel: Layout = Field(default_factory=Layout, description="How it is split over ranks.")
    batching: Batching = Field(default_factory=Batching, description="Packing.")
    data: DataSettings = Field(description="Questions to train and evaluate on.")
    rewards: RewardSettings = Field(
        default_factory=lambda: RewardSettings.parse(None), description="How they are scored."
    )
    sft: SftSettings = Field(default_factory=SftSettings, description="Stage 1: cold start.")
    rl: RlSettings = Field(default_factory=RlSettings, description="Stage 2: reinforcement learning.")
    algorithm: dict[str, Any] = Field(
        default_factory=lambda: {"name": "gspo"},
        description="A recipe by name (`algorithm=grpo`), or its name with changed parts; see `megarl algorithms`.",
    )
    sampling: SamplingSettings = Field(
        default_factory=SamplingSettings, description="How responses are drawn."
    )
    engine: AnyEngineSettings = Field(
        default_factory=EmbeddedSettings, discriminator="kind", description="What draws them."
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Held-out accuracy.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and resuming.")
    log: LogSettings = Field(default_factory=LogSettings, description="Metrics and samples.")
    alarms: AlarmSettings = Field(default_factory=AlarmSettings, description="Metrics that warn or stop.")

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("engine", mode="wrap")
    @classmethod
    def _engine_by_kind(cls, value: Any, read: ValidatorFunctionWrapHandler) -> EngineSettings:
        """Read the section by its kind; without one it is of the embedded engine."""
        if isinstance(value, EngineSettings):
            return value
        if isinstance(value, dict):
            value = {"kind": "embedded", **value}
            if is_own(value["kind"]):
                return read_own_engine(value)
        return read(value)  # type: ignore[no-any-return]
