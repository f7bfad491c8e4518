"""Settings of the megatron room: how the policy is split over ranks, how it is run, how its weights are stepped."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from megarl.settings import Section


class Layout(Section):
    """megatron-core's degrees of parallelism; data parallelism is what the world size leaves.

    Sequence parallelism is on exactly when tensor > 1 (megatron-core demands it for MoE).
    """

    tensor: int = Field(
        default=1, ge=1, description="Tensor parallelism, with sequence parallelism when > 1."
    )
    pipeline: int = Field(default=1, ge=1, description="Pipeline stages.")
    virtual_pipeline: int | None = Field(
        default=None,
        ge=2,
        description="Model chunks on each pipeline stage (interleaved schedule); None = one.",
    )
    expert: int = Field(default=1, ge=1, description="Ranks that share a layer's experts among them.")
    expert_tensor: int | None = Field(
        default=None,
        ge=1,
        description="Tensor parallelism inside an expert; None = 1 with expert > 1, else tensor.",
    )
    context: int = Field(default=1, ge=1, description="Ranks that share a sequence's tokens among them.")

    @field_validator("virtual_pipeline")
    @classmethod
    def _needs_stages(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("pipeline") == 1:
            raise ValueError("a virtual pipeline needs parallel.pipeline > 1")
        return value

    @property
    def expert_shards(self) -> int:
        """Ranks that share one expert's tensors."""
        return self.expert_tensor or (1 if self.expert > 1 else self.tensor)

    def replica_ranks(self) -> int:
        """Return the ranks of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context

    def problem(self, world_size: int) -> str | None:
        """Return why the layout is impossible on so many ranks, or None."""
        replica = self.replica_ranks()
        if world_size % replica:
            return (
                f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} = {replica} ranks "
                f"do not divide the world size {world_size}"
            )
        if self.expert == 1 and self.expert_shards != self.tensor:
            # its tensor_parallel layers mark expert weights by expert_model_parallel_size > 1
            return (
                f"expert_tensor {self.expert_shards} differs from tensor {self.tensor} without expert parallelism: "
                f"megatron-core would not sum the experts' gradients over the tensor-parallel ranks"
            )
        expert = self.expert * self.expert_shards * self.pipeline
        if world_size % expert:
            return (
                f"expert {self.expert} x expert_tensor {self.expert_shards} x pipeline {self.pipeline} = {expert} "
                f"ranks do not divide the world size {world_size}"
            )
        return None


class ModelSettings(Section):
    """How the policy is run: precision, memory, load balancing."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of parameters and activations; auto = bfloat16 on CUDA, float32 on a CPU.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activations recomputed in the backward pass, to save memory."
    )
    float32_lm_head: bool = Field(default=False, description="Compute the LM head's product in float32.")
    load_balancing: Literal["none", "aux_loss", "bias"] = Field(
        default="none",
        description="How experts are kept equally loaded in training: not at all, as is usual in RL; by the Switch "
        "auxiliary loss; or by updates of the routers' bias, for architectures that have one.",
    )
    load_balancing_rate: float = Field(
        default=1e-3, ge=0, description="Coefficient of the auxiliary loss, or update rate of the bias."
    )
    transformer: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of megatron-core's TransformerConfig; they win over megarl's own.",
    )


class OptimizerSettings(Section):
    """AdamW with a warm-up and a decay of the learning rate. Steps are optimizer steps."""

    lr: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(
        default=0.0,
        ge=0,
        description="Learning rate that the decay would reach in the step after the stage's last one, so that every "
        "step trains.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps of linear warm-up, from lr / warmup_steps to lr; at most the stage's.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Decay of the learning rate from the warm-up to the stage's end; a step whose gradient is not "
        "finite is not counted.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(default=0.98, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    clip_grad: float = Field(
        default=1.0, gt=0, description="Gradient norm above which gradients are scaled down."
    )

    @field_validator("min_lr")
    @classmethod
    def _decays(cls, value: float, info: ValidationInfo) -> float:
        lr = info.data.get("lr", value)
        if value > lr:
            raise ValueError(f"min_lr {value:g} is above lr {lr:g}: lower it, too")
        return value
