"""What a model family declares, and what families share: rotary settings, refusals, rows of name maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import UserError
from megarl.megatron.architecture import Architecture
from megarl.weights.checkpoint_files import MULTI_TOKEN_PREDICTION
from megarl.weights.transforms import Copy, FuseGateUp, FuseQKV, PadVocabulary

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
WHOLE = Copy()
GATED = ("gate_proj", "up_proj", "down_proj")  # HF's usual names of a SwiGLU's matrices


@dataclass(frozen=True)
class Entry:
    """One row of a name map.

    megatron: canonical name, `{layer}` and `{expert}` global numbers; hf: the HF checkpoint names fused into it.
    where: "model" (once), "layer" (each), "dense" or "moe" (each such layer), "expert" (each expert of those).
    sglang: the parameter in which SGLang holds these tensors end to end, in the order of `hf`, those of an expert
    after those of the expert before; None = each by its HF name. Tensor parallelism splits them as `transform` does.
    sglang_rows: where that parameter also holds what other rows name, (the number of the first of these tensors there,
    of how many); SGLang's loader takes such a parameter only from one request that has all of it. sglang_float32:
    SGLang holds it in float32, whatever its dtype.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Copy = WHOLE
    where: str = "model"
    sglang: str | None = None
    sglang_rows: tuple[int, int] | None = None
    sglang_float32: bool = False


@dataclass(frozen=True)
class Family:
    """architectures: names in an HF config's `architectures`. architecture: HF config -> Architecture, raising
    UserError on a setting megarl cannot honour. entries: the name map for a config. ignored: prefixes of checkpoint
    tensors that training leaves out on purpose. sglang: whether the entries say how SGLang lays the family out.
    sglang_config: what SGLang must be told beside config.json, by its keys: those that it reads and transformers
    leaves out. sglang_check: raises UserError on a config that SGLang would sample otherwise than megarl trains it."""

    name: str
    architectures: tuple[str, ...]
    architecture: Callable[[Mapping[str, Any]], Architecture]
    entries: Callable[[Mapping[str, Any], Architecture], tuple[Entry, ...]]
    ignored: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
    sglang: bool = False
    sglang_config: Callable[[Mapping[str, Any], Architecture], Mapping[str, Any]] = lambda config, arch: {}
    sglang_check: Callable[[Mapping[str, Any], Architecture], None] = lambda config, arch: None


@dataclass(frozen=True)
class Item:
    """One Megatron tensor of the whole model: its canonical name (global layer and expert numbers), the HF tensors
    fused into it, and how they relate. expert: its number, None outside the experts. sglang...: as in `Entry`."""

    name: str
    hf: tuple[str, ...]
    transform: Copy
    expert: int | None = None
    sglang: str | None = None
    sglang_rows: tuple[int, int] | None = None
    sglang_float32: bool = False


def expand(entries: tuple[Entry, ...], arch: Architecture) -> Iterator[Item]:
    """Yield every tensor of the model, in checkpoint order."""
    layers, moe = arch.transformer["num_layers"], set(arch.moe_layers)
    wanted = {"layer": lambda n: True, "dense": lambda n: n not in moe, "moe": lambda n: n in moe}
    wanted["expert"] = wanted["moe"]

    def item(entry: Entry, layer: int | None = None, expert: int | None = None) -> Item:
        def fill(name: str) -> str:
            return name.format(layer=layer, expert=expert)

        fused = None if entry.sglang is None else fill(entry.sglang)
        hf = tuple(map(fill, entry.hf))
        rows, float32 = entry.sglang_rows, entry.sglang_float32
        return Item(fill(entry.megatron), hf, entry.transform, expert, fused, rows, float32)

    in_layers = [e for e in entries if e.where != "model"]
    first = next((n for n, e in enumerate(entries) if e.where != "model"), len(entries))
    yield from (item(e) for e in entries[:first])
    for layer in range(layers):
        for entry in in_layers:
            if wanted[entry.where](layer):
                experts = range(arch.num_experts) if entry.where == "expert" else [None]
                yield from (item(entry, layer, expert) for expert in experts)
    yield from (item(e) for e in entries[first:] if e.where == "model")


# -- What a config asks for ----------------------------------------------------------------------------------------


def refuse(key: str, value: Any, why: str) -> UserError:
    """Make the error for a config key that megarl cannot honour."""
    return UserError(f"config.json: {key}: {value!r} is not supported; {why}")


def not_in_sglang(key: str, value: Any, why: str) -> UserError:
    """Make the error for a config key with which SGLang would not sample as the policy."""
    return UserError(
        f"engine.kind: sglang cannot sample this model: config.json has {key}: {value!r}, and {why}; use the embedded "
        "engine"
    )


def sparse_and_untied(config: Mapping[str, Any], arch: Architecture) -> None:
    """Refuse, for SGLang, dense layers and tied embeddings of a Mixture of Experts: its models have neither."""
    if arch.moe_layers:
        if len(arch.moe_layers) < arch.transformer["num_layers"]:
            layers, what = (
                sorted({*range(arch.transformer["num_layers"])} - {*arch.moe_layers}),
                "dense layers",
            )
            raise not_in_sglang(what, layers, "SGLang makes every layer of this family a Mixture of Experts")
        refuse_tied(config, arch)


def heads_of_hidden_size(config: Mapping[str, Any], arch: Architecture) -> None:
    """Refuse, for SGLang, heads of another size than hidden_size / num_attention_heads, and what `sparse_and_untied`
    refuses."""
    size = config["hidden_size"] // config["num_attention_heads"]
    if arch.transformer["kv_channels"] != size:
        raise not_in_sglang(
            "head_dim", arch.transformer["kv_channels"], f"SGLang makes it {size} in this family"
        )
    sparse_and_untied(config, arch)


def refuse_tied(config: Mapping[str, Any], arch: Architecture) -> None:
    """Refuse, for SGLang, tied embeddings: its model of such a family has an LM head of its own."""
    if arch.tied_embeddings:
        raise not_in_sglang("tie_word_embeddings", True, "SGLang gives this family an LM head of its own")


def require(config: Mapping[str, Any], why: str, **wanted: Any) -> None:
    """Check that each key is absent, null or as wanted. Raises UserError that names the first that is not."""
    for key, value in wanted.items():
        if config.get(key) is not None and config[key] != value:
            raise refuse(key, config[key], f"only {value!r} ({why})")


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse what no family here honours: quantized weights, another activation, sliding windows that ever apply."""
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise refuse("quantization_config", method, "convert the checkpoint to bfloat16 first")
    require(config, "SwiGLU", hidden_act="silu")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise refuse("layer_types", sorted(set(config["layer_types"])), "only full attention")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < config["max_position_embeddings"]:
        raise refuse("sliding_window", window, "only full attention: set it to null")


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base, kind ("default" | "llama3" | "yarn" ...), the kind's own numbers, and the share of a
    head that is rotated. key: where the config says it."""

    theta: float
    kind: str
    numbers: Mapping[str, Any]
    percent: float
    key: str


def rope_of(config: Mapping[str, Any], *kinds: str, percent: float = 1.0) -> Rope:
    """Read the rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    kinds: those that the family honours beside "default"; another raises UserError.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    numbers = config.get(key) or {}
    kind = numbers.get("rope_type") or numbers.get("type") or "default"
    if kind != "default" and kind not in kinds:
        raise refuse(f"{key}.rope_type", kind, f"only {', '.join(('default', *kinds))}")
    theta = numbers.get("rope_theta") or config.get("rope_theta") or 10000.0
    rotated = numbers.get("partial_rotary_factor") or config.get("partial_rotary_factor") or percent
    return Rope(float(theta), kind, numbers, float(rotated), key)


def llama3_scaling(rope: Rope) -> float | None:
    """Return the factor of Llama 3's frequency scaling, None without. megatron-core has its other numbers built in."""
    if rope.kind != "llama3":
        return None
    built_in = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for name, value in built_in.items():
        if rope.numbers.get(name, value) != value:
            raise refuse(f"{rope.key}.{name}", rope.numbers[name], f"megatron-core has {value:g} built in")
    return float(rope.numbers["factor"])


def leading_dense(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the MoE layers when `first_k_dense_replace` layers before them are dense."""
    require(config, "every later layer is a Mixture of Experts", moe_layer_freq=1)
    return tuple(range(int(config.get("first_k_dense_replace") or 0), config["num_hidden_layers"]))


def decoder_settings(config: Mapping[str, Any], moe_layers: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the TransformerConfig fields that every family reads from the same keys."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
    }
    if moe_layers:
        fields["moe_layer_freq"] = [int(n in moe_layers) for n in range(layers)]
        fields["moe_router_topk"] = config["num_experts_per_tok"]
    return fields


def softmax_router(config: Mapping[str, Any], *, normalised: bool) -> dict[str, Any]:
    """Return the fields of a router that takes a softmax over all experts, then the top-k. normalised: the chosen
    gates are scaled to sum to 1, which is the softmax over the chosen logits alone."""
    if normalised and config["num_experts_per_tok"] == 1:
        raise refuse("num_experts_per_tok", 1, "its normalised gate is always 1; the router would not learn")
    return {"moe_router_pre_softmax": not normalised}


class _BestOfGroup(int):
    """How many expert groups a token may use, each group ranked by the sum of its best `best` scores.

    megatron-core ranks a group by its best topk // group_topk scores (`moe_utils.group_limited_topk`), DeepSeek-V3
    by its best 2, DeepSeek-V2 by its best: so that quotient is this number's to say.
    """

    best: int

    def __new__(cls, groups: int, best: int) -> _BestOfGroup:
        number = super().__new__(cls, groups)
        number.best = best
        return number

    def __rfloordiv__(self, topk: int) -> int:
        return self.best

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.best


def group_limit(config: Mapping[str, Any], *, best: int) -> dict[str, Any]:
    """Return the fields of group-limited routing, where a config has it. best: how many of a group's scores rank it."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups == 1 or groups == chosen:
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": _BestOfGroup(chosen, best)}


def sigmoid_router(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a router with sigmoid scores, a selection bias for each expert that training leaves as it
    is, and gates that sum to a factor."""
    require(config, "a sigmoid router", scoring_func="sigmoid", topk_method="noaux_tc")
    if not config.get("norm_topk_prob", True):
        raise refuse("norm_topk_prob", False, "megatron-core normalises sigmoid gates")
    if config["num_experts_per_tok"] == 1:
        raise refuse("num_experts_per_tok", 1, "megatron-core does not normalise a single sigmoid gate")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        **group_limit(config, best=2),
    }


def shared_and_routed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of routed and shared experts by DeepSeek's keys."""
    size, shared = config["moe_intermediate_size"], config.get("n_shared_experts") or 0
    fields = {"num_moe_experts": some_experts(config), "moe_ffn_hidden_size": size}
    return {**fields, "moe_shared_expert_intermediate_size": size * shared} if shared else fields


EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts: published checkpoints say `num_experts` or `n_routed_experts`, transformers 5 saves
    `num_local_experts`."""
    return int(next((config[key] for key in EXPERTS if config.get(key)), 0))


def some_experts(config: Mapping[str, Any]) -> int:
    """Return `experts_of` where every model of the family has some."""
    if not (experts := experts_of(config)):
        raise UserError(f"config.json: says no number of experts ({', '.join(EXPERTS)})")
    return experts


def multi_token_prediction(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the extra layers of multi-token prediction, which are stored behind the decoder's and not
    trained."""
    extra = max(int(config.get(key) or 0) for key in MULTI_TOKEN_PREDICTION)
    first = config["num_hidden_layers"]
    return tuple(f"model.layers.{n}." for n in range(first, first + extra))


# -- Rows of name maps ---------------------------------------------------------------------------------------------


def name_map(arch: Architecture, *parts: Iterable[Entry]) -> tuple[Entry, ...]:
    """Make a whole table: embedding, the layers' `parts` between their two norms, final norm, LM head."""
    vocabulary = PadVocabulary(vocab_size=arch.vocab_size)
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    table = [
        Entry(embedding, ("model.embed_tokens.weight",), vocabulary),
        layer("input_layernorm.weight", "input_layernorm.weight"),
        layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        *(entry for part in parts for entry in part),
        Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ]
    if not arch.tied_embeddings:
        table.append(Entry(head, ("lm_head.weight",), vocabulary))
    return tuple(table)


def layer(
    megatron: str,
    *hf: str,
    transform: Copy = WHOLE,
    where: str = "layer",
    sglang: str | None = None,
    sglang_rows: tuple[int, int] | None = None,
    sglang_float32: bool = False,
) -> Entry:
    """Make a row inside a layer, from its names there."""
    names, fused = tuple(HF_LAYER + name for name in hf), sglang and HF_LAYER + sglang
    return Entry(MEGATRON_LAYER + megatron, names, transform, where, fused, sglang_rows, sglang_float32)


def attention(arch: Architecture, *, bias: bool = False, norms: bool = False) -> list[Entry]:
    """Make the rows of grouped-query attention. bias: q, k and v have one. norms: q and k are normed."""
    shape = arch.transformer
    qkv = FuseQKV(
        groups=shape["num_query_groups"], heads=shape["num_attention_heads"], head_dim=shape["kv_channels"]
    )

    def fused(what: str) -> Entry:
        names = [f"self_attn.{x}_proj.{what}" for x in "qkv"]
        sglang = f"self_attn.qkv_proj.{what}"
        return layer(f"self_attention.linear_qkv.{what}", *names, transform=qkv, sglang=sglang)

    table = [fused("weight")]
    if bias:
        table.append(fused("bias"))
    if norms:
        table += [layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk"]
    return [*table, layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", transform=Copy(1))]


def gated_mlp(megatron: str, hf: str, where: str, names: tuple[str, ...] = GATED) -> list[Entry]:
    """Make the rows of a SwiGLU below `megatron` and `hf`. names: HF's for gate, up, down."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    first, second = f"{hf}.gate_up_proj.weight", None
    if where == "expert":  # SGLang holds all experts of a layer in one parameter
        first, second = hf.format(expert="w13_weight"), hf.format(expert="w2_weight")
    return [
        layer(f"{megatron}.linear_fc1.weight", gate, up, transform=FuseGateUp(), where=where, sglang=first),
        layer(f"{megatron}.linear_fc2.weight", down, transform=Copy(1), where=where, sglang=second),
    ]


def dense_mlp() -> list[Entry]:
    return gated_mlp("mlp", "mlp", "dense")


def routed_experts(
    hf: str = "mlp", names: tuple[str, ...] = GATED, *, sglang_float32: bool = False
) -> list[Entry]:
    """Make the rows of router and experts, below `hf`. sglang_float32: the router is so in SGLang."""
    return [
        layer("mlp.router.weight", f"{hf}.gate.weight", where="moe", sglang_float32=sglang_float32),
        *gated_mlp("mlp.experts.{expert}", hf + ".experts.{expert}", "expert", names),
    ]


def expert_bias() -> Entry:
    """Make the row of the sigmoid router's selection bias: a buffer, not a parameter."""
    name = "mlp.gate.e_score_correction_bias"
    return layer("mlp.router.expert_bias", name, where="moe", sglang_float32=True)


def shared_experts(arch: Architecture, hf: str = "mlp.shared_experts") -> list[Entry]:
    if "moe_shared_expert_intermediate_size" not in arch.transformer:
        return []
    return gated_mlp("mlp.shared_experts", hf, "moe")


def decoder(
    config: Mapping[str, Any],
    transformer: Mapping[str, Any],
    moe_layers: tuple[int, ...] = (),
    rope: Rope | None = None,
    **further: Any,
) -> Architecture:
    """Return the architecture of a decoder whose config names sizes and tied embeddings as most do. rope: None = only
    the default kind is honoured. further: Architecture fields of this family's own."""
    return Architecture(
        transformer=transformer,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rotary_base=(rope or rope_of(config)).theta,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        moe_layers=moe_layers,
        **further,
    )
