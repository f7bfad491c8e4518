"""The whole configuration of a run, typed.

Sections that belong to one room sit in that room's `settings.py` (plain pydantic, no torch) and are composed here.
Rules between sections are in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from megarl.data.settings import DataSettings, DemonstrationSettings
from megarl.megatron.settings import Layout, ModelSettings, OptimizerSettings
from megarl.monitor.settings import AlarmSettings, LogSettings
from megarl.rewards.settings import RewardSettings
from megarl.rollout.settings import SamplingSettings
from megarl.settings import Section


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
    """The policy: the checkpoint and tokenizer that it starts from, or a model made on the spot, and how it is run."""

    path: str | None = Field(default=None, description="Hugging Face checkpoint folder to start from.")
    make: dict[str, Any] | None = Field(
        default=None,
        description="Hugging Face config fields (with model_type) of a model made with random weights instead.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Tokenizer folder, or `tiny`: built for the data's questions. None = the one in model.path.",
    )
    chat_template: str | None = Field(
        default=None, description="Jinja file to use in place of the tokenizer's own chat template."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, such as {enable_thinking: false}."
    )
    tokenizer_vocab: int = Field(default=384, ge=259, description="Vocabulary of a `tiny` tokenizer.")


class Demonstrations(Section):
    """Conversations in files, or worked and direct answers to arithmetic questions, made on the spot."""

    file: DemonstrationSettings | None = Field(
        default=None,
        description="Files to learn from (a `messages` or a response column); None = made on the spot.",
    )

    worked_share: float = Field(
        default=0.3, ge=0, le=1, description="Share of demonstrations that show their work."
    )
    openings: tuple[str, ...] = Field(
        default=("",),
        min_length=1,
        description="How worked demonstrations begin; each as often as the others.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the demonstrations, and of their order in files.")


class Sft(Section):
    """Stage 1: supervised fine-tuning on demonstrations (cold start). 0 steps = no such stage."""

    steps: int = Field(default=0, ge=0, description="Optimizer steps of the cold start.")
    batch_size: int = Field(default=128, ge=1, description="Demonstrations per step, over all replicas.")
    demonstrations: Demonstrations = Field(
        default_factory=Demonstrations, description="What is demonstrated."
    )
    optimizer: OptimizerSettings = Field(
        default_factory=lambda: OptimizerSettings(lr=1e-3, schedule="cosine"),
        description="Optimizer settings of the cold start.",
    )
    log_every: int = Field(default=20, ge=1, description="Steps between two lines of metrics.")


class ReferencePolicy(Section):
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


class Rl(Section):
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
    reference: ReferencePolicy = Field(
        default_factory=ReferencePolicy, description="The reference policy, for algorithms with a KL penalty."
    )
    critic: CriticSettings = Field(
        default_factory=CriticSettings, description="The value model, for algorithms with a critic."
    )


class EmbeddedEngine(Section):
    """An engine inside each leader's process, for laptops and tests."""

    kind: Literal["embedded"] = Field(default="embedded", description="The small engine of megarl's own.")
    slots: int = Field(default=256, ge=1, description="Responses decoded together.")


class SglangEngine(Section):
    """SGLang servers, started, watched and stopped by megarl in an environment of their own, or given by URL."""

    kind: Literal["sglang"] = Field(default="sglang", description="SGLang's servers.")
    python: str | None = Field(
        default=None,
        description="Python of SGLang's environment; None = .venv-sglang/bin/python in the project's or this folder.",
    )
    servers: int = Field(default=1, ge=1, description="Managed servers; replicas share them in turn.")
    urls: tuple[str, ...] = Field(default=(), description="Servers that already run; none is started then.")
    tensor_parallel: int = Field(default=1, ge=1, description="Tensor parallelism of each server.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto = the trainer's.")
    port: int | None = Field(default=None, ge=1, le=65535, description="First port; None = any free one.")
    max_running_requests: int = Field(default=16, ge=1, description="Responses decoded together by a server.")
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of key-value cache; None = SGLang's."
    )
    start_timeout_s: float = Field(default=300, gt=0, description="Longest wait for a server to be ready.")
    transport: Literal["http", "broadcast"] = Field(
        default="http",
        description="How weights get into the servers: http = requests, for CPUs and small models; broadcast = a "
        "process group with them (gloo, NCCL), for clusters.",
    )
    address: str | None = Field(
        default=None,
        description="Where other machines reach this one; None = MASTER_ADDR on several nodes, else 127.0.0.1.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Further launch_server arguments by name.")


EngineSettings = Annotated[EmbeddedEngine | SglangEngine, Field(discriminator="kind")]


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
    folder: str | None = Field(default=None, description="Run folder; None = runs/<name>.")
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
    sft: Sft = Field(default_factory=Sft, description="Stage 1: cold start.")
    rl: Rl = Field(default_factory=Rl, description="Stage 2: reinforcement learning.")
    algorithm: dict[str, Any] = Field(
        default_factory=lambda: {"name": "gspo"},
        description="A recipe by name (`algorithm=grpo`), or its name with changed parts; see `megarl algorithms`.",
    )
    sampling: SamplingSettings = Field(
        default_factory=SamplingSettings, description="How responses are drawn."
    )
    engine: EngineSettings = Field(default_factory=EmbeddedEngine, description="What draws them.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Held-out accuracy.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and resuming.")
    log: LogSettings = Field(default_factory=LogSettings, description="Metrics and samples.")
    alarms: AlarmSettings = Field(default_factory=AlarmSettings, description="Metrics that warn or stop.")

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("engine", mode="before")
    @classmethod
    def _embedded_unless_told(cls, value: Any) -> Any:
        return {"kind": "embedded", **value} if isinstance(value, dict) else value
