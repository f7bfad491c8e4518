"""Build this rank's part of a policy from megatron-core's own parts.

An `Architecture` says in megatron-core's terms what the model is; `weights/families/` makes one from a Hugging
Face config. Nothing here knows Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megarl.errors import UserError, did_you_mean
from megarl.megatron.architecture import Architecture
from megarl.megatron.attention import PackedAttention, RMSNorm
from megarl.megatron.logprobs import VocabularyShard
from megarl.megatron.parts import LatentAttention, RMSNormOverHeads, StockLatentAttention
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout, ModelSettings


def padded_vocab_size(architecture: Architecture, layout: Layout) -> int:
    """The smallest multiple of the tensor-parallel size that holds the vocabulary."""
    return -(-architecture.vocab_size // layout.tensor) * layout.tensor


OWN_SPLIT = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)  # a user's own say about the layers of each stage


def check_fits(architecture: Architecture, layout: Layout, extra: Mapping[str, Any] | None = None) -> None:
    """Raises UserError where the model cannot be split so. extra: `ModelSettings.transformer`."""
    shape, experts = {**architecture.transformer, **(extra or {})}, architecture.num_experts
    _check_extra(architecture, extra or {})
    layers, heads = shape["num_layers"], shape["num_attention_heads"]
    groups = shape.get("num_query_groups") or heads
    if layout.expert > 1 and not experts:
        raise UserError("parallel.expert: the model is dense, it has no experts to share out; set it to 1")
    dense = len(architecture.moe_layers) < layers
    splits = [
        ("tensor", layout.tensor, heads, "attention heads"),
        ("tensor", layout.tensor, dense and shape["ffn_hidden_size"], "rows of a dense layer"),
        (
            "tensor",
            layout.tensor,
            shape.get("moe_shared_expert_intermediate_size"),
            "rows of a shared expert",
        ),
        ("expert", layout.expert, experts, "experts"),
        (
            "expert_tensor",
            layout.expert_shards,
            experts and shape["moe_ffn_hidden_size"],
            "rows of an expert",
        ),
    ]
    for key, degree, size, what in splits:
        if size and size % degree:
            raise UserError(f"parallel.{key}: {degree} does not divide the model's {size} {what}")
    if groups % layout.tensor and layout.tensor % groups:
        raise UserError(f"parallel.tensor: {layout.tensor} and the model's {groups} key heads do not divide")
    chunks = layout.pipeline * (layout.virtual_pipeline or 1)
    if layout.virtual_pipeline and layers % chunks and not shape.keys() & set(OWN_SPLIT):
        raise UserError(
            f"parallel.virtual_pipeline: {layers} layers do not divide into {layout.pipeline} stages x "
            f"{layout.virtual_pipeline} chunks"
        )
    if not shape.keys() & set(OWN_SPLIT):
        _last_stage(layers, layout)


def _check_extra(architecture: Architecture, extra: Mapping[str, Any]) -> None:
    """Raises UserError for a field that megatron-core's config does not have, or a word that it does not take."""
    latent = architecture.transformer.get("multi_latent_attention")
    known = get_type_hints(MLATransformerConfig if latent else TransformerConfig)
    for name, value in extra.items():
        if name not in known:
            raise UserError(
                f"model.transformer.{name}: megatron-core has no such field.{did_you_mean(name, known)}"
            )
        kinds = get_args(known[name])
        if (
            isinstance(value, str)
            and all(isinstance(kind, str) for kind in kinds)
            and value not in (kinds or [value])
        ):
            raise UserError(f"model.transformer.{name}: {value!r} is none of {', '.join(kinds)}")


def _last_stage(layers: int, layout: Layout) -> int | None:
    """Layers of the last pipeline stage, which also has the LM head, where they do not divide; else None."""
    stages = layout.pipeline
    if layout.virtual_pipeline or layers % stages == 0:
        return None
    last = layers - -(-layers // stages) * (stages - 1)
    if last < 1:
        raise UserError(
            f"parallel.pipeline: {layers} layers leave one of {stages} stages empty; use fewer stages"
        )
    return last


def _load_balancing(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    """TransformerConfig fields. Raises UserError where the router has no bias to update."""
    if settings.load_balancing == "none" or not architecture.num_experts:
        return {}
    if settings.load_balancing == "aux_loss":
        return {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": settings.load_balancing_rate,
        }
    if not architecture.transformer.get("moe_router_enable_expert_bias"):
        raise UserError(
            "model.load_balancing: bias updates a router's expert bias, which this architecture does not have "
            "(DeepSeek-V3, Moonlight and GLM-4.5 do): set aux_loss or none"
        )
    return {"moe_router_bias_update_rate": settings.load_balancing_rate}


def transformer_config(
    architecture: Architecture, layout: Layout, platform: Platform, settings: ModelSettings
) -> TransformerConfig:
    """megatron-core's config: the architecture, the layout, the platform, in that order. Raises UserError for a layout
    that the model cannot have, and for settings.transformer that megatron-core does not take."""
    check_fits(architecture, layout, settings.transformer)
    dtype, layers = platform.dtype_of(settings.dtype), architecture.transformer["num_layers"]
    own_split = settings.transformer.keys() & set(OWN_SPLIT)
    fields: dict[str, Any] = {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        **architecture.transformer,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "num_layers_in_last_pipeline_stage": None if own_split else _last_stage(layers, layout),
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_shards,
        "sequence_parallel": layout.tensor > 1,
        "variable_seq_lengths": layout.pipeline > 1,
        # The interleaved schedule on two stages sends to and receives from one peer both ways at once: only one
        # direction at a time keeps megatron-core's shape exchange and its tensors apart.
        "overlap_p2p_comm": layout.virtual_pipeline is not None,
        "batch_p2p_comm": layout.virtual_pipeline is None,
        # Losses arrive with their weights decided on the global batch: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
        **platform.transformer_settings(),
        **_load_balancing(architecture, settings),
    }
    if settings.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif settings.recompute == "selective":
        fields |= {"recompute_granularity": "selective"}
    kind: type[TransformerConfig] = TransformerConfig
    if architecture.transformer.get("multi_latent_attention"):
        # the fused rotary kernel wants YaRN; the plain one serves both
        kind, fields["apply_rope_fusion"] = MLATransformerConfig, False
    try:
        return kind(**{**fields, **settings.transformer})
    except (TypeError, ValueError, AssertionError) as error:
        if not settings.transformer:
            raise
        raise UserError(f"model.transformer: megatron-core does not take it: {error}") from error


class _HiddenStateHead(ColumnParallelLinear):
    """An LM head that hands the hidden states on: the product with its weight happens chunk by chunk, in
    `logprobs.py`, so that the logits of a whole micro-batch never exist."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        return input_, None


class _ValueHead(torch.nn.Module):
    """The last layer of a critic: hands the hidden states on, as `_HiddenStateHead`, and makes values of them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(config.hidden_size, dtype=config.params_dtype))

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        return input_, None

    def values(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> float32 [tokens]."""
        return hidden.float() @ self.weight.float()


def _layer_specs(
    config: TransformerConfig, architecture: Architecture, platform: Platform, vp_stage: int | None
) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=platform.transformer_engine,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    if not platform.transformer_engine:
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs or []:
            _use_own_parts(layer.submodules, config)
    for layer in spec.layer_specs or []:
        if layer.submodules.self_attention.module is MLASelfAttention:
            layer.submodules.self_attention.module = (
                StockLatentAttention if platform.transformer_engine else LatentAttention
            )
    if architecture.qk_norm_over_heads:
        for layer in spec.layer_specs or []:
            attention = layer.submodules.self_attention.submodules
            heads = {"q": config.num_attention_heads, "k": config.num_query_groups}
            for x, count in heads.items():
                norm = ModuleSpec(RMSNormOverHeads, params={"heads": count})
                setattr(attention, f"{x}_layernorm", norm)
    return spec


def _use_own_parts(parts: TransformerLayerSubmodules, config: TransformerConfig) -> None:
    """Norms and core attention without Transformer Engine."""
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, norm, IdentityOp) is not IdentityOp:
            setattr(attention, norm, RMSNorm)
    if parts.self_attention.module is MLASelfAttention:
        parts.self_attention.module = LatentAttention
        if config.q_lora_rank is None:  # type: ignore[attr-defined]
            attention.q_layernorm = (
                IdentityOp  # whole queries have no norm; megatron-core 0.19 refuses an unused one
            )


def _set_latent_epsilon(model: GPTModel, epsilon: float) -> None:
    """megatron-core gives latent attention's norms the layers' epsilon."""
    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                norm = getattr(
                    module, name, None
                )  # Transformer Engine fuses a norm into the projection behind it
                if norm is not None and hasattr(norm, "eps"):
                    norm.eps = epsilon


def build_model(
    architecture: Architecture,
    layout: Layout,
    platform: Platform,
    settings: ModelSettings,
    *,
    value_head: bool = False,
) -> list[GPTModel]:
    """This rank's model chunks (one, or one for each virtual pipeline stage), with random weights."""
    config = transformer_config(architecture, layout, platform, settings)
    chunks = []
    for vp_stage in range(layout.virtual_pipeline or 1):
        stage = vp_stage if layout.virtual_pipeline else None
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = GPTModel(
            config,
            _layer_specs(config, architecture, platform, stage),
            vocab_size=padded_vocab_size(architecture, layout),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=last,
            share_embeddings_and_output_weights=architecture.tied_embeddings and not value_head,
            position_embedding_type="rope",
            rotary_base=architecture.rotary_base,  # type: ignore[arg-type]
            rotary_percent=architecture.rotary_percent,
            rope_scaling=architecture.llama3_rope_factor is not None,
            rope_scaling_factor=architecture.llama3_rope_factor or 1.0,
            vp_stage=stage,
        )
        if architecture.latent_norm_epsilon is not None:
            _set_latent_epsilon(model, architecture.latent_norm_epsilon)
        if last and value_head:
            model.output_layer = _ValueHead(config)
        elif last:
            model.output_layer.__class__ = _HiddenStateHead
        chunks.append(model.to(platform.device))
    return chunks


def head_weight(model: GPTModel) -> Tensor:
    """The LM head's rows on this rank, [padded_vocab_size / tensor, hidden]; last pipeline stage only."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight  # type: ignore[return-value]


def vocabulary_shard(architecture: Architecture, layout: Layout) -> VocabularyShard:
    """The rows of the vocabulary on this rank."""
    rows = padded_vocab_size(architecture, layout) // layout.tensor
    start = rows * parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group() if layout.tensor > 1 else None
    return VocabularyShard(start, max(0, min(rows, architecture.vocab_size - start)), group)
