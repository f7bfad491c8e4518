"""What a decoder-only language model is, in megatron-core's terms. Plain data: neither torch nor megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model.

    transformer: TransformerConfig fields that say what the model computes (sizes, norms, router), nothing of layout.
    vocab_size: rows of the Hugging Face embedding; each rank's share is padded up where it does not divide.
    max_positions: longest sequence. rotary_base, rotary_percent: RoPE; llama3_rope_factor: Llama 3's frequency scaling.
    tied_embeddings: the LM head is the embedding. qk_norm_over_heads: q and k are normed over all heads at once.
    latent_norm_epsilon: of latent attention's own norms, where it is not layernorm_epsilon.
    moe_layers: 0-based numbers of the Mixture-of-Experts layers, in order; empty for a dense model.
    """

    transformer: Mapping[str, Any]
    vocab_size: int
    max_positions: int
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    llama3_rope_factor: float | None = None
    tied_embeddings: bool = False
    qk_norm_over_heads: bool = False
    latent_norm_epsilon: float | None = None
    moe_layers: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def top_k(self) -> int:
        return int(self.transformer.get("moe_router_topk", 0)) if self.num_experts else 0
