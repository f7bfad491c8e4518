"""The whole configuration of a run, typed.

Sections that belong to one room sit in that room's `settings.py` (plain pydantic, no torch) and are composed here.
Rules between sections are in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from megarl.config.base import Section
from megarl.data.settings import DataSettings, DemonstrationSettings
from megarl.rewards.settings import RewardSettings
from megarl.rollout.declaration import EngineSettings
from megarl.rollout.embedded.settings import EmbeddedSettings
from megarl.rollout.registry import AnyEngineSettings, is_own, read_own_engine

Schedule = Literal["constant", "linear", "cosine"]


class Launch(Section):
    """How `megarl train` starts its ranks when it is not already under torchrun."""

    ranks: int | None = Field(
        default=None,
        ge=1,
        description="Processes on this machine; None = its GPUs, on a CPU the smallest layout.",
    )
    threads_per_rank: int = Field(default=1, ge=1, description="CPU threads of each rank (OMP_NUM_THREADS).")
    timeout_minutes: float = Field(default=30, gt=0, description="Longest wait for a collective.")


class Model(Section):
    """The policy: a Hugging Face checkpoint."""

    path: str | None = Field(
        default=None, description="Hugging Face checkpoint folder to start from; required."
    )
    tokenizer: str | None = Field(default=None, description="Tokenizer folder; None = the one in model.path.")
    chat_template: str | None = Field(
        default=None, description="Jinja file to use in place of the tokenizer's own chat template."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, such as {enable_thinking: false}."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Parameters and activations; auto = bfloat16 on CUDA, float32 on a CPU."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activation recomputation in backward, to save memory."
    )
    float32_lm_head: bool = Field(default=False, description="Compute the LM head's product in float32.")
    load_balancing: Literal["none", "aux_loss", "bias"] = Field(
        default="none",
        description="Of the experts, in training: none, as is usual in RL; the Switch auxiliary loss; or the update "
        "of the routers' bias, for architectures that have one.",
    )
    load_balancing_rate: float = Field(
        default=1e-3, ge=0, description="Coefficient of the auxiliary loss, or the bias's update rate."
    )
    transformer: dict[str, Any] = Field(
        default_factory=dict, description="Further megatron-core TransformerConfig fields, as a last word."
    )


class Parallel(Section):
    """megatron-core's degrees of parallelism; data parallelism is what the world size leaves."""

    tensor: int = Field(
        default=1, ge=1, description="Tensor parallelism, with sequence parallelism when > 1."
    )
    pipeline: int = Field(default=1, ge=1, description="Pipeline stages.")
    virtual_pipeline: int | None = Field(
        default=None, ge=2, description="Model chunks a stage (interleaved)."
    )
    expert: int = Field(default=1, ge=1, description="Ranks that share out a layer's experts.")
    expert_tensor: int | None = Field(
        default=None,
        ge=1,
        description="Tensor parallelism inside an expert; None = 1 with expert > 1, else tensor.",
    )
    context: int = Field(default=1, ge=1, description="Ranks that share out a sequence.")


class Optimizer(Section):
    """AdamW; steps are optimizer steps."""

    lr: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate at the end of the decay.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    schedule: Schedule = Field(default="constant", description="After the warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(default=0.98, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    clip_grad: float = Field(
        default=1.0, gt=0, description="Gradient norm above which gradients are scaled down."
    )

    @model_validator(mode="after")
    def _decays(self) -> Optimizer:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}: lower it, too")
        return self


class Sft(Section):
    """Stage 1: supervised fine-tuning on demonstrations (cold start). 0 steps = no such stage."""

    steps: int = Field(default=0, ge=0, description="Optimizer steps.")
    batch_size: int = Field(default=128, ge=1, description="Demonstrations per step, over all replicas.")
    demonstrations: DemonstrationSettings | None = Field(
        default=None, description="Files to learn from: a `messages` or a response column."
    )
    optimizer: Optimizer = Field(
        default_factory=lambda: Optimizer(lr=1e-3, schedule="cosine"), description="Of this stage."
    )
    log_every: int = Field(default=20, ge=1, description="Steps between two lines of metrics.")


class Sampling(Section):
    """How responses are drawn for training."""

    temperature: float = Field(default=1.0, gt=0, description="Softmax temperature, the same on both sides.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus; < 1 samples from another distribution."
    )
    top_k: int = Field(default=-1, ge=-1, description="Most likely tokens kept; -1 = all.")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Least probability relative to the likeliest token."
    )
    max_new_tokens: int = Field(default=1024, ge=1, description="Longest response in tokens, EOS included.")


class ReferencePolicy(Section):
    """The frozen policy that a KL penalty holds the policy to, for algorithms with one."""

    replace_every: int = Field(
        default=0, ge=0, description="RL steps after which it becomes the policy of then; 0 = never."
    )


class CriticSettings(Section):
    """The value model of `ppo`: the policy's backbone of the start with a value head."""

    optimizer: Optimizer = Field(default_factory=Optimizer, description="Of its own.")


class Rl(Section):
    """Stage 2: reinforcement learning. A step samples, scores, trains on all of it, and syncs the engine."""

    steps: int = Field(default=100, ge=0, description="Rollout steps.")
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
        description="RL steps between audits: a forward pass of its own, with live routing, against the engine's "
        "log-probabilities; 0 = none.",
    )
    audit_responses: int = Field(default=32, ge=1, description="Responses of an audit, over all replicas.")
    max_staleness: int = Field(
        default=0, ge=0, description="Weight versions that a response's oldest token may be behind."
    )
    stale_responses: Literal["stop", "drop", "correct"] = Field(
        default="stop",
        description="Older ones: stop the run; drop them; or train on them, which takes algorithm.correction. Counted.",
    )
    routes_in_memory_mib: int = Field(
        default=1024, ge=0, description="A step's routes beyond this go to a file, on each rank."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="Of this stage.")
    reference: ReferencePolicy = Field(
        default_factory=ReferencePolicy, description="For algorithms with a KL."
    )
    critic: CriticSettings = Field(
        default_factory=CriticSettings, description="For algorithms with a critic."
    )


class Evaluation(Section):
    """Greedy answers to held-out prompts (`data.heldout`, `data.evaluations`)."""

    every: int = Field(default=10, ge=0, description="RL steps between evaluations; 0 = only first and last.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="None = sampling.max_new_tokens.")


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


class Log(Section):
    """Where the numbers go."""

    sinks: tuple[Literal["jsonl", "console", "tensorboard", "wandb"], ...] = Field(
        default=("jsonl", "console"), description="Sinks of the metrics; jsonl is the record of the run."
    )
    project: str = Field(default="megarl", description="W&B project.")
    samples_every: int = Field(
        default=10, ge=0, description="RL steps between two files of samples; 0 = none."
    )


class AlarmRuleSettings(Section):
    """A metric that must not do something."""

    metric: str = Field(description="A metric's name, see docs/metrics.md.")
    when: Literal["above", "below", "not_finite"] = Field(description="What is wrong.")
    threshold: float | None = Field(default=None, description="Above or below what.")
    action: Literal["warn", "stop"] = Field(default="warn", description="Say so, or stop the run as well.")
    patience: int = Field(default=1, ge=1, description="Steps in a row before it is told.")
    advice: str = Field(default="", description="What to do then, told with it.")

    @model_validator(mode="after")
    def _threshold(self) -> AlarmRuleSettings:
        if (self.threshold is None) != (self.when == "not_finite"):
            raise ValueError("'above' and 'below' need a threshold, 'not_finite' takes none")
        return self


class Alarms(Section):
    """When a run warns or stops by itself."""

    defaults: bool = Field(default=True, description="megarl's own rules, of megarl/monitor/alarms.py, too.")
    rules: tuple[AlarmRuleSettings, ...] = Field(default=(), description="Further rules.")


class Config(Section):
    """A run."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$", description="Name of the run.")
    folder: str | None = Field(default=None, description="Run folder; None = runs/<name>.")
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of everything that has no seed of its own."
    )
    platform: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto = CUDA where there is one."
    )
    launch: Launch = Field(default_factory=Launch, description="Ranks on this machine.")
    model: Model = Field(default_factory=Model, description="The policy.")
    parallel: Parallel = Field(default_factory=Parallel, description="How it is split over ranks.")
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
    sampling: Sampling = Field(default_factory=Sampling, description="How responses are drawn.")
    engine: AnyEngineSettings = Field(
        default_factory=EmbeddedSettings, discriminator="kind", description="What draws them."
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Held-out accuracy.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and resuming.")
    log: Log = Field(default_factory=Log, description="Metrics and samples.")
    alarms: Alarms = Field(default_factory=Alarms, description="Metrics that warn or stop.")

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
