"""OLMoE: q and k are normed over all their heads at once, every layer a Mixture of Experts, softmax top-k router."""

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
    name_map,
    refuse,
    refuse_unsupported,
    require,
    routed_experts,
    softmax_router,
    some_experts,
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config)
    require(config, "megatron-core has no bias there", attention_bias=False)
    if config.get("clip_qkv") is not None:
        raise refuse("clip_qkv", config["clip_qkv"], "megatron-core does not clip q, k, v; only null")
    moe_layers = tuple(range(config["num_hidden_layers"]))
    transformer = decoder_settings(config, moe_layers) | {
        "qk_layernorm": True,
        "num_moe_experts": some_experts(config),
        "moe_ffn_hidden_size": config["intermediate_size"],
        **softmax_router(config, normalised=bool(config.get("norm_topk_prob", False))),
    }
    return decoder(config, transformer, moe_layers, qk_norm_over_heads=True)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[Entry, ...]:
    return name_map(arch, attention(arch, norms=True), routed_experts())


OLMOE = Family("olmoe", ("OlmoeForCausalLM",), architecture, entries, sglang=True)
