"""Configs as the published checkpoints have them, older keys and all, mean what their papers say."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.weights.families import family_of
from megarl.weights.families.base import expand

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MOONLIGHT = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
GLM_45 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}

EXPECTED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = [
    (
        DEEPSEEK_V3,
        {
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "rotary_scaling_factor": 40.0,
            "mscale_all_dim": 1.0,
        },
        {"rotary_base": 10000.0},
        58,
    ),
    (
        MOONLIGHT,
        {"rope_type": "rope", "rotary_scaling_factor": 1.0, "moe_shared_expert_intermediate_size": 2816},
        {"rotary_base": 50000.0, "latent_norm_epsilon": 1e-6},
        26,
    ),
    (
        DEEPSEEK_V2,
        {"moe_router_pre_softmax": True, "moe_router_group_topk": 3, "moe_router_topk_scaling_factor": 16.0},
        {},
        59,
    ),
    (GLM_45, {"add_qkv_bias": True, "qk_layernorm": True}, {"rotary_percent": 0.5, "rotary_base": 1e6}, 89),
    (LLAMA_31, {"kv_channels": 128}, {"llama3_rope_factor": 8.0, "rotary_base": 500000.0}, 0),
    (QWEN_25, {"add_qkv_bias": True, "kv_channels": 128}, {"rotary_base": 1e6}, 0),
]


@pytest.mark.parametrize(
    ("config", "transformer", "others", "moe_layers"),
    EXPECTED,
    ids=[e[0]["architectures"][0] for e in EXPECTED],
)
def test_a_published_config_is_understood(
    config: dict[str, Any], transformer: dict[str, Any], others: dict[str, Any], moe_layers: int
) -> None:
    arch = family_of(config).architecture(config)
    assert {key: arch.transformer.get(key) for key in transformer} == transformer
    assert {key: getattr(arch, key) for key in others} == others
    assert len(arch.moe_layers) == moe_layers


def test_groups_are_ranked_as_the_papers_say() -> None:
    """DeepSeek-V2 takes a group's best expert although topk // groups is 2, V3 the best two."""
    v2, v3 = (family_of(c).architecture(c).transformer for c in (DEEPSEEK_V2, DEEPSEEK_V3))
    assert v2["moe_router_topk"] // v2["moe_router_group_topk"] == 1
    assert v3["moe_router_topk"] // v3["moe_router_group_topk"] == 2


def test_every_tensor_of_deepseek_v3_is_mapped_once() -> None:
    """Counted by hand: 61 layers, 3 of them dense, 256 experts in each other."""
    family = family_of(DEEPSEEK_V3)
    arch = family.architecture(DEEPSEEK_V3)
    names = [name for item in expand(family.entries(DEEPSEEK_V3, arch), arch) for name in item.hf]
    attention_and_norms, dense, experts, shared_and_router = 9, 3, 3 * 256, 3 + 2
    layers = 61 * attention_and_norms + 3 * dense + 58 * (experts + shared_and_router)
    assert len(names) == len(set(names)) == layers + 3
    assert family.ignored(DEEPSEEK_V3) == ("model.layers.61.",)
