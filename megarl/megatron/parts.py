"""Attention parts that megatron-core lacks or gets wrong without Transformer Engine. They take part in tensor and
sequence parallelism; `model.py` puts them into the layer specs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class RMSNormOverHeads(torch.nn.Module):
    """OLMoE's q and k norm: the root mean square is taken over all heads at once, of which tensor parallelism leaves
    a rank a few. megatron-core norms each head by itself.

    Every rank holds the whole weight and uses its heads' part: megatron-core sums the gradients of whatever is named
    q_layernorm or k_layernorm over the tensor-parallel ranks (`finalize_model_grads`). With more ranks than key heads,
    several neighbours hold the same head.
    """

    def __init__(self, config: Any, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.ranks, self.heads = eps, config.tensor_model_parallel_size, heads
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, head_dim] -> the same shape."""
        flat, weight = x.flatten(-2).float(), self.weight
        squares = flat.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            holders = x.shape[-2] * self.ranks // self.heads  # ranks that hold the same head
            weight = weight.chunk(self.ranks // holders)[
                parallel_state.get_tensor_model_parallel_rank() // holders
            ]
            # summed in both directions: every rank's output depends on every rank's squares
            squares = reduce_from_tensor_model_parallel_region(squares / holders)
            squares = copy_to_tensor_model_parallel_region(squares)
        normed = flat * torch.rsqrt(squares / len(self.weight) + self.eps)
        return (weight * normed.to(x.dtype)).view_as(x)


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole and applies to its own tokens."""

    def __init__(self, config: Any, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class StockLatentAttention(MLASelfAttention):
    """megarl's name for megatron-core's latent attention, whose whole queries (no `q_lora_rank`) have no norm.

    From 0.19 on megatron-core puts one before `linear_q_proj` as soon as the compressed keys have theirs.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Called by the versions that choose so; the projection is the spec's own."""
        chosen = super()._resolve_qk_norm_config(submodules)  # type: ignore[misc]
        return {**chosen, "linear_q_proj": submodules.linear_q_proj}


class LatentAttention(StockLatentAttention):
    """megatron-core's latent attention with whole down-projections, as Transformer Engine's spec has them.

    Its local spec splits them over tensor-parallel ranks and gathers their outputs; the gradient of the rotary key
    that all heads share then comes from a rank's own heads alone (`gather_from_tensor_model_parallel_region` splits
    it without a sum).
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, config.q_lora_rank)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, latent)
