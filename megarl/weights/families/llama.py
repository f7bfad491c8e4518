"""Llama 3 (dense): grouped-query attention, SwiGLU, Llama 3's frequency scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base


def architecture(config: Mapping[str, Any]) -> Architecture:
    base.refuse_unsupported(config)
    base.require(config, "Llama 3 has none", attention_bias=False, mlp_bias=False)
    rope = base.rope_of(config, "llama3")
    factor = base.llama3_scaling(rope)
    return base.decoder(config, base.decoder_settings(config), rope=rope, llama3_rope_factor=factor)


def entries(config: Mapping[str, Any], arch: Architecture) -> tuple[base.Entry, ...]:
    return base.name_map(arch, base.attention(arch), base.dense_mlp())


LLAMA = base.Family("llama", ("LlamaForCausalLM",), architecture, entries, sglang=True)
