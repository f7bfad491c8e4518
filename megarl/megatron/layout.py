"""Degrees of parallelism, and why some are impossible. Plain data: neither torch nor megatron-core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; data parallelism is what the world size leaves.

    sequence parallelism is on exactly when tensor > 1 (megatron-core demands it for MoE).
    expert_tensor: None = 1 with expert parallelism, else as tensor.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    context: int = 1

    @property
    def expert_shards(self) -> int:
        """Ranks that share one expert's tensors."""
        return self.expert_tensor or (1 if self.expert > 1 else self.tensor)

    def replica_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    def problem(self, world_size: int) -> str | None:
        """Why the layout is impossible on so many ranks, or None."""
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
