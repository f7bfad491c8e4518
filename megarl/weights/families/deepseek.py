"""DeepSeek-V2, DeepSeek-V3 (and R1), Moonlight, GLM-4.7-Flash: multi-head latent attention, leading dense layers,
shared experts. V2 routes by softmax, the later ones by sigmoid scores with a selection bias.

transformers norms the two latents with an epsilon of its own (1e-6), whatever `rms_norm_eps` says; so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.megatron.architecture import Architecture
from megarl.weights.families import base
from megarl.weights.transforms import Copy

LATENT_EPSILON = 1e-6


def _yarn(rope: base.Rope) -> dict[str, Any]:
    """Return YaRN's fields as megatron-core's latent attention takes them; without YaRN its scale must be told to be
    1."""
    if rope.kind != "yarn":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    numbers = rope.numbers
    if numbers.get("attention_factor") is not None or numbers.get("truncate") is False:
        name = "truncate" if numbers.get("truncate") is False else "attention_factor"
        raise base.refuse(f"{rope.key}.{name}", numbers[name], "megatron-core has no such setting here")
    mscale, all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if all_dim and not mscale:
        raise base.refuse(f"{rope.key}.mscale_all_dim", all_dim, "only together with mscale")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(numbers["factor"]),
        "original_max_position_embeddings": int(numbers["original_max_position_embeddings"]),
        "beta_fast": float(numbers.get("beta_fast") or 32),
        "beta_slow": float(numbers.get("beta_slow") or 1),
        "mscale": float(mscale) if mscale and all_dim else 1.0,
        "mscale_all_dim": float(all_dim) if mscale and all_dim else 0.0,
    }


def _latent_architecture(
    config: Mapping[str, Any], moe_layers: tuple[int, ...], router: Mapping[str, Any]
) -> Architecture:
    base.refuse_unsupported(config)
    base.require(config, "megatron-core has no bias there", attention_bias=False, mlp_bias=False)
    base.require(config, "the published weights are interleaved", rope_interleave=True)
    heads, rope = config["num_attention_heads"], base.rope_of(config, "yarn")
    transformer = base.decoder_settings(config, moe_layers) | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": heads,
        "kv_channels": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rotary_base": rope.theta,
        **_yarn(rope),
        **base.shared_and_routed(config),
        **router,
    }
    if config.get("num_key_value_heads") not in (None, heads):
        raise base.refuse(
            "num_key_value_heads", config["num_key_value_heads"], f"only num_attention_heads, {heads}"
        )
    return base.decoder(config, transformer, moe_layers, rope, latent_norm_epsilon=LATENT_EPSILON)


def _v2(config: Mapping[str, Any]) -> Architecture:
    base.require(config, "as the published checkpoints", scoring_func="softmax", norm_topk_prob=False)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise base.refuse("topk_method", method, "only 'greedy' and 'group_limited_greedy'")
    router = base.softmax_router(config, normalised=False)
    router["moe_router_topk_scaling_factor"] = config["routed_scaling_factor"]
    if method == "group_limited_greedy":
        router |= base.group_limit(config, best=1)
    return _latent_architecture(config, base.leading_dense(config), router)


def _v3(config: Mapping[str, Any]) -> Architecture:
    return _latent_architecture(config, base.leading_dense(config), base.sigmoid_router(config))


def _glm4_lite(config: Mapping[str, Any]) -> Architecture:
    if (kinds := config.get("mlp_layer_types")) is None:
        moe_layers = base.leading_dense({"first_k_dense_replace": 1, **config})
    else:
        moe_layers = tuple(n for n, kind in enumerate(kinds) if kind == "sparse")
    return _latent_architecture(config, moe_layers, base.sigmoid_router(config))


def entries(
    config: Mapping[str, Any], arch: Architecture, *, float32_router: bool = False
) -> tuple[base.Entry, ...]:
    here, compressed = "self_attention.", arch.transformer["q_lora_rank"] is not None
    # Where queries are compressed too, SGLang computes both latents by one matrix.
    fused = "self_attn.fused_qkv_a_proj_with_mqa.weight" if compressed else None
    if not compressed:
        query = [base.layer(here + "linear_q_proj.weight", "self_attn.q_proj.weight", transform=Copy(0))]
    else:
        query = [
            base.layer(
                here + "linear_q_down_proj.weight",
                "self_attn.q_a_proj.weight",
                sglang=fused,
                sglang_rows=(0, 2),
            ),
            base.layer(here + "q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
            base.layer(here + "linear_q_up_proj.weight", "self_attn.q_b_proj.weight", transform=Copy(0)),
        ]
    latent = [
        *query,
        base.layer(
            here + "linear_kv_down_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            sglang=fused,
            sglang_rows=(1, 2) if compressed else None,
        ),
        base.layer(here + "kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
        base.layer(here + "linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", transform=Copy(0)),
        base.layer(here + "linear_proj.weight", "self_attn.o_proj.weight", transform=Copy(1)),
    ]
    biased = arch.transformer.get("moe_router_enable_expert_bias")
    return base.name_map(
        arch,
        latent,
        base.dense_mlp(),
        base.routed_experts(sglang_float32=float32_router),
        [base.expert_bias()] if biased else [],
        base.shared_experts(arch),
    )


def _sglang_v2(config: Mapping[str, Any], arch: Architecture) -> Mapping[str, Any]:
    told = {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False}
    if (config.get("topk_method") or "greedy") == "greedy":
        return {**told, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return {**told, **_groups(config)}


def _sglang_v3(config: Mapping[str, Any], arch: Architecture) -> Mapping[str, Any]:
    told = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
    return {**told, **_groups(config)}


def _sglang_glm4_lite(config: Mapping[str, Any], arch: Architecture) -> Mapping[str, Any]:
    dense = arch.transformer["num_layers"] - len(arch.moe_layers)
    return {"first_k_dense_replace": dense, "norm_topk_prob": True, **_groups(config)}


def _check_glm4_lite(config: Mapping[str, Any], arch: Architecture) -> None:
    base.refuse_tied(config, arch)
    layers = arch.transformer["num_layers"]
    if arch.moe_layers != tuple(range(layers - len(arch.moe_layers), layers)):
        raise base.not_in_sglang(
            "mlp_layer_types", config["mlp_layer_types"], "SGLang wants dense layers first"
        )


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    return {"n_group": config.get("n_group") or 1, "topk_group": config.get("topk_group") or 1}


DEEPSEEK_V2 = base.Family(
    "deepseek_v2", ("DeepseekV2ForCausalLM",), _v2, entries, sglang=True, sglang_config=_sglang_v2
)
DEEPSEEK_V3 = base.Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    _v3,
    entries,
    base.multi_token_prediction,
    sglang=True,
    sglang_config=_sglang_v3,
)
GLM4_MOE_LITE = base.Family(
    "glm4_moe_lite",
    ("Glm4MoeLiteForCausalLM",),
    _glm4_lite,
    partial(entries, float32_router=True),
    base.multi_token_prediction,
    sglang=True,
    sglang_config=_sglang_glm4_lite,
    sglang_check=_check_glm4_lite,
)
