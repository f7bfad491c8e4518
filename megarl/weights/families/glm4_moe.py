"""GLM-4.5, 4.6 and 4.7: partly rotated grouped-query attention, leading dense layers, DeepSeek-V3's router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base


def architecture(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    moe_layers, rope = base.leading_dense(config), base.rope_of(config, percent=0.5)
    transformer = base.decoder_settings(config, moe_layers) | {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **base.shared_and_routed(config),
        **base.sigmoid_router(config),
    }
    return base.decoder(config, transformer, moe_layers, rope, rotary_percent=rope.percent)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    shape = arch.transformer
    return base.name_map(
        arch,
        base.attention(arch, bias=shape["add_qkv_bias"], norms=shape["qk_layernorm"]),
        base.dense_mlp(),
        base.routed_experts(sglang_float32=True),
        [base.expert_bias()],
        base.shared_experts(arch),
    )


GLM4_MOE = base.Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    architecture,
    entries,
    base.multi_token_prediction,
    sglang=True,
    sglang_check=base.refuse_tied,
)
