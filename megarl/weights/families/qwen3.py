"""Qwen3 (dense) and Qwen3-MoE: grouped-query attention with q/k norms, SwiGLU, softmax top-k router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families.base import (
    Entry,
    Family,
    attention,
    decoder,
    decoder_settings,
    dense_mlp,
    experts_of,
    name_map,
    refuse_unsupported,
    require,
    routed_experts,
    softmax_router,
)


def sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the MoE layers by Qwen's keys: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    if not experts_of(config):
        return ()
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return tuple(n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0)


def architecture(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config)
    require(config, "Qwen3 has none", attention_bias=False)
    moe_layers = sparse_layers(config)
    transformer = decoder_settings(config, moe_layers) | {"qk_layernorm": True}
    if moe_layers:
        transformer |= {
            "num_moe_experts": experts_of(config),
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            **softmax_router(config, normalised=bool(config.get("norm_topk_prob", False))),
        }
    return decoder(config, transformer, moe_layers)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[Entry, ...]:
    return name_map(arch, attention(arch, norms=True), dense_mlp(), routed_experts())


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), architecture, entries, sglang=True)
