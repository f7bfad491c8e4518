"""Qwen3 (dense) and Qwen3-MoE: grouped-query attention with q/k norms, SwiGLU, softmax top-k router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base


def sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the MoE layers by Qwen's keys: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    if not base.experts_of(config):
        return ()
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return tuple(n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0)


def architecture(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    base.require(config, "Qwen3 has none", attention_bias=False)
    moe_layers = sparse_layers(config)
    transformer = base.decoder_settings(config, moe_layers) | {"qk_layernorm": True}
    if moe_layers:
        transformer |= {
            "num_moe_experts": base.experts_of(config),
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            **base.softmax_router(config, normalised=bool(config.get("norm_topk_prob", False))),
        }
    return base.decoder(config, transformer, moe_layers)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    return base.name_map(arch, base.attention(arch, norms=True), base.dense_mlp(), base.routed_experts())


QWEN3 = base.Family("qwen3", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), architecture, entries, sglang=True)
