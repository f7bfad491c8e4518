"""The one difference between a laptop and a cluster: device, communication backend and model parts.

`Platform.cuda()`: NCCL, Transformer Engine modules, fused optimizers. `Platform.cpu()`: gloo, megatron-core's local
modules with megarl's packed attention and RMSNorm, and the adaptations of `cpu.py`, entered explicitly.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megarl.errors import UserError
from megarl.megatron import cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Platform:
    """device: where tensors live. backend: of torch.distributed. transformer_engine: use its modules.
    dtype: what "auto" means for parameters and activations."""

    kind: Literal["cpu", "cuda"]
    device: torch.device
    backend: str
    transformer_engine: bool
    dtype: torch.dtype

    @classmethod
    def detect(cls, kind: str = "auto") -> Platform:
        """The platform asked for; "auto" takes CUDA where torch sees a device.

        Raises UserError when CUDA is asked for and absent.
        """
        if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
            return cls("cpu", torch.device("cpu"), "gloo", transformer_engine=False, dtype=torch.float32)
        if not torch.cuda.is_available():
            raise UserError(
                "platform: cuda, but torch finds no CUDA device; set platform=cpu or check the driver"
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return cls("cuda", device, "nccl", transformer_engine=True, dtype=torch.bfloat16)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that a setting names: "auto", "float32" or "bfloat16"."""
        return self.dtype if name == "auto" else DTYPES[name]

    def enter(self) -> None:
        """Make this process ready for the platform. Idempotent; before process groups and models are made."""
        if self.kind == "cpu":
            cpu.adapt()
        else:
            torch.cuda.set_device(self.device)

    def transformer_settings(self) -> dict[str, Any]:
        """TransformerConfig fields that depend on the platform."""
        on_gpu = self.kind == "cuda"
        return {
            "use_cpu_initialization": not on_gpu,
            "gradient_accumulation_fusion": False,
            "moe_grouped_gemm": on_gpu,
            "moe_permute_fusion": False,
            "bias_activation_fusion": on_gpu,
            "bias_dropout_fusion": on_gpu,
            "masked_softmax_fusion": on_gpu,
            "apply_rope_fusion": on_gpu,
        }

    def prepare_parameters(self, model: torch.nn.Module) -> None:
        """What the optimizer needs of the parameters before it is built."""
        if self.kind == "cpu":
            cpu.name_as_cuda(model.parameters())
