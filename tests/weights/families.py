"""Tiny random checkpoints of every family, made by transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.data.packing import TokenSequence
from megarl.records import Sample
from tests.models import randomize

VOCABULARY = 101  # odd: tensor parallelism pads it


@dataclass(frozen=True)
class Tiny:
    """One tiny model. moe: has experts, so that expert parallelism means something."""

    config: Callable[..., Any]
    fields: dict[str, Any] = field(default_factory=dict)
    moe: bool = True


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "routed_scaling_factor": 1.7,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}

FAMILIES: dict[str, Tiny] = {
    "qwen3": Tiny(Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}, moe=False),
    "qwen3-moe": Tiny(
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen2.5": Tiny(Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, moe=False),
    "qwen2.5-one-kv-head": Tiny(Qwen2Config, {"num_key_value_heads": 1}, moe=False),
    "qwen2-moe": Tiny(
        Qwen2MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "llama-3": Tiny(
        LlamaConfig,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        moe=False,
    ),
    "mixtral": Tiny(MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": Tiny(OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": Tiny(
        DeepseekV2Config,
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v2-lite": Tiny(
        DeepseekV2Config,
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 1, "rope_parameters": YARN},
    ),
    "deepseek-v3": Tiny(
        DeepseekV3Config,
        {
            **LATENT,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "num_mtp_layers": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": Tiny(
        DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_mtp_layers": 0,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    "glm-4.5": Tiny(
        Glm4MoeConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "glm-4.7-flash": Tiny(Glm4MoeLiteConfig, LATENT),
}


def config_of(name: str) -> dict[str, Any]:
    """The tiny model's config.json."""
    tiny = FAMILIES[name]
    config = tiny.config(**{**SHAPE, **tiny.fields})
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [model.__name__]}


def make(name: str, folder: Path, *, seed: int = 0, shard: str = "5GB", **overrides: Any) -> Path:
    """Write the tiny model of that name, norms, biases and buffers random."""
    tiny = FAMILIES[name]
    config = tiny.config(**{**SHAPE, **tiny.fields, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


@torch.no_grad()
def reference_logprobs(folder: Path, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """transformers' log-probabilities of every token but the first, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for sample in samples:
        ids = torch.from_numpy(TokenSequence.from_sample(sample).token_ids)[None]
        logits = model(ids).logits[0, :-1].float()
        found[sample.sample_id] = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return found
