"""GLM-4.5, 4.6 and 4.7: partly rotated grouped-query attention, leading dense layers, DeepSeek-V3's router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families.base import (
    Entry,
    Family,
    attention,
    decoder_settings,
    dense_mlp,
    expert_bias,
    leading_dense,
    multi_token_prediction,
    name_map,
    refuse_unsupported,
    rope_of,
    routed_experts,
    shared_and_routed,
    shared_experts,
    sigmoid_router,
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config)
    moe_layers, rope = leading_dense(config), rope_of(config, percent=0.5)
    transformer = decoder_settings(config, moe_layers) | {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **shared_and_routed(config),
        **sigmoid_router(config),
    }
    return Architecture(
        transformer=transformer,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rotary_base=rope.theta,
        rotary_percent=rope.percent,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        moe_layers=moe_layers,
    )


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[Entry, ...]:
    shape = arch.transformer
    return name_map(
        arch,
        attention(arch, bias=shape["add_qkv_bias"], norms=shape["qk_layernorm"]),
        dense_mlp(),
        routed_experts(),
        [expert_bias()],
        shared_experts(arch),
    )


GLM4_MOE = Family("glm4_moe", ("Glm4MoeForCausalLM",), architecture, entries, multi_token_prediction)
