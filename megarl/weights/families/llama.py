"""Llama 3 (dense): grouped-query attention, SwiGLU, Llama 3's frequency scaling."""

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
    llama3_scaling,
    name_map,
    refuse_unsupported,
    require,
    rope_of,
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config)
    require(config, "Llama 3 has none", attention_bias=False, mlp_bias=False)
    rope = rope_of(config, "llama3")
    return Architecture(
        transformer=decoder_settings(config),
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rotary_base=rope.theta,
        llama3_rope_factor=llama3_scaling(rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[Entry, ...]:
    return name_map(arch, attention(arch), dense_mlp())


LLAMA = Family("llama", ("LlamaForCausalLM",), architecture, entries, sglang=True)
