"""Mixtral: grouped-query attention, every layer a Mixture of Experts, normalised softmax top-k router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base


def architecture(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    moe_layers = tuple(range(config["num_hidden_layers"]))
    transformer = base.decoder_settings(config, moe_layers) | {
        "num_moe_experts": base.some_experts(config),
        "moe_ffn_hidden_size": config["intermediate_size"],
        **base.softmax_router(config, normalised=True),
    }
    return base.decoder(config, transformer, moe_layers)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    return base.name_map(
        arch, base.attention(arch), base.routed_experts("block_sparse_moe", ("w1", "w3", "w2"))
    )


MIXTRAL = base.Family(
    "mixtral",
    ("MixtralForCausalLM",),
    architecture,
    entries,
    sglang=True,
    sglang_check=base.heads_of_hidden_size,
)
