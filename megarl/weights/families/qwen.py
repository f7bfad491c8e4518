"""Qwen2, Qwen2.5 and Qwen3 (dense), Qwen2-MoE and Qwen3-MoE: grouped-query attention, SwiGLU, softmax top-k router.

Qwen2 has biases for q, k and v, and its MoE one shared expert behind a sigmoid gate; Qwen3 norms q and k.
"""

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


def routed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a MoE layer's experts and router."""
    return {
        "num_moe_experts": base.experts_of(config),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        **base.softmax_router(config, normalised=bool(config.get("norm_topk_prob", False))),
    }


def _qwen2(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    moe_layers = sparse_layers(config)
    transformer = base.decoder_settings(config, moe_layers)
    transformer["add_qkv_bias"] = bool(config.get("qkv_bias", True))
    if moe_layers:
        transformer |= {
            **routed(config),
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    return base.decoder(config, transformer, moe_layers)


def _qwen3(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    base.require(config, "Qwen3 has none", attention_bias=False)
    moe_layers = sparse_layers(config)
    transformer = base.decoder_settings(config, moe_layers) | {"qk_layernorm": True}
    if moe_layers:
        transformer |= routed(config)
    return base.decoder(config, transformer, moe_layers)


def _qwen2_entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    gate = base.layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", where="moe")
    return base.name_map(
        arch,
        base.attention(arch, bias=arch.transformer["add_qkv_bias"]),
        base.dense_mlp(),
        base.routed_experts(),
        base.shared_experts(arch, "mlp.shared_expert"),
        [gate] if arch.moe_layers else [],
    )


def _qwen3_entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    return base.name_map(arch, base.attention(arch, norms=True), base.dense_mlp(), base.routed_experts())


def _sglang_qwen2(config: Mapping[str, Any], arch: Architecture) -> None:
    if arch.moe_layers:
        base.heads_of_hidden_size(config, arch)


QWEN2 = base.Family(
    "qwen2",
    ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    _qwen2,
    _qwen2_entries,
    sglang=True,
    sglang_check=_sglang_qwen2,
)
QWEN3 = base.Family(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    _qwen3,
    _qwen3_entries,
    sglang=True,
    sglang_check=base.sparse_and_untied,
)
