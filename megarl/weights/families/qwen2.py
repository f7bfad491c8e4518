"""Qwen2 and Qwen2.5 (dense) and Qwen2-MoE: biased q/k/v; the MoE adds one shared expert behind a sigmoid gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base
from megarl.weights.families.qwen3 import sparse_layers


def architecture(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    moe_layers = sparse_layers(config)
    transformer = base.decoder_settings(config, moe_layers) | {
        "add_qkv_bias": bool(config.get("qkv_bias", True))
    }
    if moe_layers:
        transformer |= {
            "num_moe_experts": base.experts_of(config),
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
            **base.softmax_router(config, normalised=bool(config.get("norm_topk_prob", False))),
        }
    return base.decoder(config, transformer, moe_layers)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    gate = base.layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", where="moe")
    return base.name_map(
        arch,
        base.attention(arch, bias=arch.transformer["add_qkv_bias"]),
        base.dense_mlp(),
        base.routed_experts(),
        base.shared_experts(arch, "mlp.shared_expert"),
        [gate] if arch.moe_layers else [],
    )


QWEN2 = base.Family("qwen2", ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"), architecture, entries, sglang=True)
