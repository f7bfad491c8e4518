"""A policy's name map, made whole: every tensor of the model as an `Item` with its HF names and its owner's place.

The same items drive HF load, HF save, weight sync and the coverage check.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.megatron.architecture import Architecture
from megarl.megatron.settings import Layout
from megarl.weights.families import family_of
from megarl.weights.families.base import expand


class Model(Protocol):
    """This rank's part of a policy, as far as its weights go: a `Policy`, or a `BareModel`."""

    @property
    def architecture(self) -> Architecture: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def chunks(self) -> list[GPTModel]: ...
    @property
    def optimizer(self) -> Any: ...


@dataclass(frozen=True)
class BareModel:
    """Weights alone: neither gradients nor an optimizer."""

    architecture: Architecture
    layout: Layout
    chunks: list[GPTModel]
    optimizer: None = None


class NameMap:
    """The name map of one policy under one layout.

    ignored: prefixes of checkpoint tensors that the family leaves out on purpose.
    """

    def __init__(self, hf_config: Mapping[str, Any], model: Model) -> None:
        arch = model.architecture
        family = family_of(hf_config)
        self.items = tuple(expand(family.entries(hf_config, arch), arch))
        self.ignored = family.ignored(hf_config)
        self.model = model

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters, and its routers' expert biases (buffers), by canonical name. A tied LM head
        on a later stage is the embedding's copy."""
        experts_per_rank = self.model.architecture.num_experts // self.model.layout.expert
        first_expert = experts_per_rank * parallel_state.get_expert_model_parallel_rank()
        return {
            canonical_name(name, chunk, first_expert): tensor
            for chunk in self.model.chunks
            for name, tensor in (
                *chunk.named_parameters(),
                *(b for b in chunk.named_buffers() if b[0].endswith("router.expert_bias")),
            )
        }


def canonical_name(name: str, chunk: Any, first_expert: int) -> str:
    """Return a local parameter name with global layer and expert numbers, the same for local and Transformer Engine
    modules (which keep layer norms inside the next linear layer, and experts as weight0, weight1, ...)."""
    if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = chunk.decoder.layers[int(match[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{match[2]}"
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_weight", r"\1_layernorm.weight", name)
    if match := re.match(r"(.*experts)\.local_experts\.(\d+)\.(.*)", name):
        return f"{match[1]}.{int(match[2]) + first_expert}.{match[3]}"
    if match := re.match(r"(.*experts)\.(linear_fc[12])\.weight(\d+)", name):
        return f"{match[1]}.{int(match[3]) + first_expert}.{match[2]}.weight"
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name
