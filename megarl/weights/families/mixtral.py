"""Mixtral: grouped-query attention, every layer a Mixture of Experts, normalised softmax top-k router."""

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
    refuse_unsupported,
    routed_experts,
    softmax_router,
    some_experts,
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config)
    moe_layers = tuple(range(config["num_hidden_layers"]))
    transformer = decoder_settings(config, moe_layers) | {
        "num_moe_experts": some_experts(config),
        "moe_ffn_hidden_size": config["intermediate_size"],
        **softmax_router(config, normalised=True),
    }
    return decoder(config, transformer, moe_layers)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[Entry, ...]:
    return name_map(arch, attention(arch), routed_experts("block_sparse_moe", ("w1", "w3", "w2")))


MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), architecture, entries)
