"""OLMoE: q and k are normed over all their heads at once, every layer a Mixture of Experts, softmax top-k router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base


def architecture(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    base.require(config, "megatron-core has no bias there", attention_bias=False)
    if config.get("clip_qkv") is not None:
        raise base.refuse("clip_qkv", config["clip_qkv"], "megatron-core does not clip q, k, v; only null")
    moe_layers = tuple(range(config["num_hidden_layers"]))
    transformer = base.decoder_settings(config, moe_layers) | {
        "qk_layernorm": True,
        "num_moe_experts": base.some_experts(config),
        "moe_ffn_hidden_size": config["intermediate_size"],
        **base.softmax_router(config, normalised=bool(config.get("norm_topk_prob", False))),
    }
    return base.decoder(config, transformer, moe_layers, qk_norm_over_heads=True)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    return base.name_map(arch, base.attention(arch, norms=True), base.routed_experts())


def _sglang(config: Mapping[str, Any], arch: Architecture) -> None:
    heads, keys = arch.transformer["num_attention_heads"], arch.transformer["num_query_groups"]
    if keys != heads:
        raise base.not_in_sglang(
            "num_key_value_heads", keys, f"SGLang norms keys as if they had {heads} heads"
        )
    if config.get("norm_topk_prob"):
        raise base.not_in_sglang("norm_topk_prob", True, "SGLang does not normalise the gates of this family")
    base.heads_of_hidden_size(config, arch)


OLMOE = base.Family("olmoe", ("OlmoeForCausalLM",), architecture, entries, sglang=True, sglang_check=_sglang)
