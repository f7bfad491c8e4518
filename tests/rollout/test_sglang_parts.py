"""The sglang engine's parts that need no SGLang: answers decoded, layouts hashed, settings checked."""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import UserError
from megarl.megatron.architecture import Architecture
from megarl.records import WeightSpan
from megarl.rollout.engine import EngineError, GenerateRequest, SamplingParams
from megarl.rollout.sglang import layout as layouts
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.launch import server_command
from megarl.rollout.sglang.layout import FusedDigests, FusedLayout, gpu_hash, parts_of, sha256_hash
from megarl.rollout.sglang.process import free_port
from megarl.rollout.sglang.settings import SGLangSettings
from megarl.rollout.sglang.transports import make_buckets
from megarl.rollout.sglang.wire import decode_result, encode_request
from megarl.weights.families.qwen import QWEN3
from tests.models import MOE_SHAPE, SHAPE, tiny_qwen3, tiny_qwen3_moe
from tests.rollout.reference import checkpoint_weights
from tests.rollout.scripted import context_of
from tests.weights.families import FAMILIES, config_of

# --- the wire ---

MODEL = Architecture(
    {"num_layers": 4, "num_moe_experts": 300, "moe_router_topk": 2},
    vocab_size=50,
    max_positions=64,
    moe_layers=(1, 3),
)
REQUEST = GenerateRequest("sample/7", np.array([5, 6, 7], dtype=np.int32), SamplingParams(8), True)


def answer(experts: np.ndarray | None = None, **meta: Any) -> dict[str, Any]:
    """What SGLang answers to REQUEST: two tokens, [4 tokens, 4 layers, top-2] routes."""
    if experts is None:
        experts = np.arange(4 * 4 * 2).reshape(4, 4, 2) + 250
    return {
        "output_ids": [11, 12],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 12},
            "output_token_logprobs": [[-0.5, 11, None], [-0.25, 12, None]],
            "weight_version": "3",
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            "routed_experts": base64.b64encode(experts.astype(np.int32).tobytes()).decode(),
            "num_retractions": 0,
            **meta,
        },
    }


def test_dense_layers_are_dropped_and_the_smallest_integer_type_is_used() -> None:
    experts = np.arange(4 * 4 * 2).reshape(4, 4, 2) + 250
    result = decode_result(REQUEST, answer(experts), MODEL)
    assert result.routes is not None
    np.testing.assert_array_equal(result.routes.experts, experts[:, [1, 3]])
    assert result.routes.experts.dtype == np.uint16
    small = replace(MODEL, transformer={**MODEL.transformer, "num_moe_experts": 256})
    result = decode_result(REQUEST, answer(experts % 256), small)
    assert result.routes is not None
    assert result.routes.experts.dtype == np.uint8


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"experts": np.full((4, 4, 2), 300)}, "300"),
        ({"experts": np.zeros((3, 4, 2))}, r"not \[tokens - 1, layers, top_k\] = \(4, 4, 2\)"),
        ({"routed_experts": None}, "enable-return-routed-experts"),
        (
            {"weight_versions": None, "weight_version": "default"},
            "version 'default', which megarl did not load",
        ),
        ({"output_token_logprobs": [[-0.5, 11, None]]}, "log-probabilities"),
        ({"output_token_logprobs": [[-0.5, 11, None], [-0.5, 13, None]]}, "log-probabilities"),
        (
            {"finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500}},
            "out of memory",
        ),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error_naming_the_sample(
    broken: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(EngineError, match=f"(?s)'sample/7'.*{complaint}"):
        decode_result(REQUEST, answer(**broken), MODEL)


def test_routes_of_a_retracted_request_belong_to_the_last_weights() -> None:
    versions = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    result = decode_result(REQUEST, answer(weight_versions=versions, num_retractions=1), MODEL)
    assert result.spans == (WeightSpan(3, 0, 1), WeightSpan(4, 1, 2))
    assert result.routes is not None
    assert result.routes.spans == (WeightSpan(4, 0, 2),)
    stayed = decode_result(REQUEST, answer(weight_versions=versions), MODEL, "in_place")
    assert stayed.routes is not None
    assert stayed.routes.spans == stayed.spans
    with pytest.raises(EngineError, match="unknown"):
        decode_result(REQUEST, answer(weight_versions=versions, num_retractions=1), MODEL, "in_place")


def test_an_abort_in_the_queue_has_no_routes_and_so_yields_no_tokens() -> None:
    aborted = answer(finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    del aborted["meta_info"]["routed_experts"]
    result = decode_result(REQUEST, aborted, MODEL)
    assert result.finish_reason == "abort"
    assert (len(result.response_ids), len(result.logprobs), result.spans, result.routes) == (0, 0, (), None)


def test_a_request_says_everything_that_a_checkpoint_could_have_defaults_for() -> None:
    sampling = encode_request(REQUEST, "rid")["sampling_params"]
    assert sampling["ignore_eos"] is True
    assert {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
    } <= sampling.keys()
    stopping = GenerateRequest("r", REQUEST.token_ids, SamplingParams(8, stop_token_ids=(2,)))
    assert encode_request(stopping, "rid")["sampling_params"]["ignore_eos"] is False


# --- the layout ---


@pytest.mark.parametrize(
    ("count", "dtype", "shape", "expected"),
    [
        # Made by SGLang 0.5.23's own kernel (kernels/ops/memory/gpu_tensor_hash.py) in triton's interpreter.
        (20000, torch.float32, (100, 200), "3b4a39253310d295"),
        (4097, torch.bfloat16, (4097,), "96e4a82b5de4e193"),
    ],
)
def test_the_gpu_hash_is_the_one_of_sglangs_kernel(
    count: int, dtype: torch.dtype, shape: tuple[int, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = (torch.arange(count) % 251).to(dtype).reshape(shape)
    assert gpu_hash(tensor) == expected
    monkeypatch.setattr(layouts, "_TILES_AT_ONCE", 1)  # a tensor of several chunks
    assert gpu_hash(tensor) == expected


@pytest.mark.parametrize("hash_of", [sha256_hash, gpu_hash])
def test_a_hash_notices_one_bit_and_an_exchange(hash_of: Callable[[torch.Tensor], str]) -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    flipped, exchanged = tensor.clone(), tensor.clone()
    flipped.view(torch.int32)[500] ^= 1
    exchanged[[10, 20]] = tensor[[20, 10]]
    assert len({hash_of(tensor), hash_of(flipped), hash_of(exchanged)}) == 3
    assert hash_of(tensor.clone()) == hash_of(tensor)


def digests(weights: dict[str, torch.Tensor], layout: FusedLayout) -> dict[str, str]:
    fused = FusedDigests(layout, "cpu")
    for name, tensor in weights.items():
        fused.add(name, tensor)
    return fused.finish()


def test_digests_do_not_depend_on_the_order_of_the_stream(tmp_path: Path) -> None:
    layout = FusedLayout.of(tiny_qwen3_moe(tmp_path))
    weights = checkpoint_weights(tmp_path)
    assert digests(weights, layout) == digests(dict(reversed(weights.items())), layout)


def test_a_stream_that_lacks_a_part_or_repeats_one_is_refused_by_name(tmp_path: Path) -> None:
    layout = FusedLayout.of(tiny_qwen3_moe(tmp_path))
    weights = checkpoint_weights(tmp_path)
    lacking = {name: t for name, t in weights.items() if name != "model.layers.1.self_attn.k_proj.weight"}
    with pytest.raises(ValueError, match=r"incomplete model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        digests(lacking, layout)
    fused = FusedDigests(layout, "cpu")
    for name in ("lm_head.weight", "model.norm.weight"):
        fused.add(name, weights[name])
    with pytest.raises(ValueError, match=r"'lm_head.weight' came twice"):
        fused.add("lm_head.weight", weights["lm_head.weight"])


def test_every_tensor_parallel_rank_holds_its_shard(tmp_path: Path) -> None:
    weights = checkpoint_weights(tiny_qwen3_moe(tmp_path))
    layout = FusedLayout.of(tmp_path, tp_size=4, device="cuda")
    attention = "model.layers.0.self_attn."
    q, k, v = (weights[f"{attention}{part}_proj.weight"] for part in "qkv")
    # Four ranks, four query heads and two key-value heads of 16: ranks 2 and 3 share the second of these.
    expected = torch.cat([q[48:64], k[16:32], v[16:32]])
    held = digests(weights, layout)
    assert held[f"{attention}qkv_proj.weight@tp3"] == sha256_hash(expected)
    assert held[f"{attention}o_proj.weight@tp1"] == sha256_hash(
        weights[f"{attention}o_proj.weight"][:, 16:32]
    )
    # 264 rows of the vocabulary are padded to 320.
    padded = torch.cat([weights["lm_head.weight"], torch.zeros(320 - 264, 64)])
    assert held["lm_head.weight@tp2"] == sha256_hash(padded[160:240])
    with pytest.raises(UserError, match="tensor_parallel=4 on a CPU"):
        FusedLayout.of(tmp_path, tp_size=4, device="cpu")


def test_on_a_cpu_ranks_beyond_the_key_heads_hold_zeros(tmp_path: Path) -> None:
    weights = checkpoint_weights(tiny_qwen3(tmp_path, num_key_value_heads=1))
    held = digests(weights, FusedLayout.of(tmp_path, tp_size=2, device="cpu"))
    attention = "model.layers.0.self_attn."
    q, k, v, o = (weights[f"{attention}{part}_proj.weight"] for part in "qkvo")
    # One key-value head and its four query heads, and as many of zeros: all that is real is the first rank's.
    real = torch.cat([q, k, v])
    assert held[f"{attention}qkv_proj.weight@tp0"] == sha256_hash(real)
    assert held[f"{attention}qkv_proj.weight@tp1"] == sha256_hash(torch.zeros_like(real))
    assert held[f"{attention}o_proj.weight@tp0"] == sha256_hash(o)
    assert held[f"{attention}o_proj.weight@tp1"] == sha256_hash(torch.zeros_like(o))
    assert held["model.layers.0.mlp.down_proj.weight@tp1"] == sha256_hash(
        weights["model.layers.0.mlp.down_proj.weight"][:, 64:]
    )


FAMILY_FIELDS = {
    **SHAPE,
    **MOE_SHAPE,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "n_routed_experts": 8,
    "shared_expert_intermediate_size": 32,
    "attention_bias": False,
}


@pytest.mark.parametrize(
    ("architecture", "moe_layer"),
    [
        ("Qwen3MoeForCausalLM", ["experts.w13_weight", "experts.w2_weight", "gate.weight"]),
        (
            "Qwen2MoeForCausalLM",
            [
                "experts.w13_weight",
                "experts.w2_weight",
                "gate.weight",
                "shared_expert.down_proj.weight",
                "shared_expert.gate_up_proj.weight",
                "shared_expert_gate.weight",
            ],
        ),
        ("OlmoeForCausalLM", ["experts.w13_weight", "experts.w2_weight", "gate.weight"]),
        ("LlamaForCausalLM", ["down_proj.weight", "gate_up_proj.weight"]),
    ],
)
def test_a_familys_tensors_fill_each_of_the_servers_parameters_once(
    architecture: str, moe_layer: list[str]
) -> None:
    parts = parts_of({**FAMILY_FIELDS, "architectures": [architecture]}, source="here")
    numbers: dict[str, list[int]] = {}
    for part in parts.values():
        numbers.setdefault(part.name, []).append(part.number)
    counts = {part.name: part.count for part in parts.values()}
    assert {name: sorted(taken) for name, taken in numbers.items()} == {
        name: list(range(count)) for name, count in counts.items()
    }
    mlp = "model.layers.1.mlp."
    assert sorted(name.removeprefix(mlp) for name in counts if name.startswith(mlp)) == moe_layer
    assert counts["model.layers.2.self_attn.qkv_proj.weight"] == 3
    if "w13" in moe_layer[0]:  # gate and up of expert 0, gate and up of expert 1, ...
        up = parts[f"{mlp}experts.5.up_proj.weight"]
        assert (up.name, up.number, up.count) == (f"{mlp}experts.w13_weight", 11, 16)


def test_a_family_whose_layout_is_not_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        layouts, "family_of", lambda config, source: replace(QWEN3, name="mine", sglang=False)
    )
    with pytest.raises(UserError, match=r"engine\.kind: .* lays out mine \(here\).* use the embedded engine"):
        parts_of(FAMILY_FIELDS, source="here")


def folder_of(name: str, folder: Path, **fields: Any) -> Path:
    """A folder that has a tiny model's config.json alone."""
    (folder / "config.json").write_text(json.dumps({**config_of(name), **fields}))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_sglang_takes_every_family_unless_it_would_sample_otherwise(name: str, tmp_path: Path) -> None:
    refused = {"qwen3-moe": "dense layers: [0]", "olmoe": "num_key_value_heads: 2"}
    folder = folder_of(name, tmp_path)
    if name not in refused:
        SGLangSettings().check_model(folder, device="cpu")
        return
    with pytest.raises(UserError, match=r"engine\.kind: sglang cannot sample this model") as told:
        SGLangSettings().check_model(folder, device="cpu")
    assert refused[name] in str(told.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mixtral", {"tie_word_embeddings": True}),
        ("mixtral", {"head_dim": 16}),
        ("qwen2-moe", {"mlp_only_layers": [1]}),
        ("glm-4.5", {"tie_word_embeddings": True}),
        ("glm-4.7-flash", {"tie_word_embeddings": True}),
        ("glm-4.7-flash", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
        ("olmoe", {"num_key_value_heads": 4, "norm_topk_prob": True}),
    ],
)
def test_a_variant_that_sglang_would_sample_otherwise_is_refused_by_its_key(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    key = "dense layers" if "mlp_only_layers" in fields else list(fields)[-1]
    with pytest.raises(UserError, match=f"engine.kind: sglang .* config.json has {key}: .* embedded engine"):
        SGLangSettings().check_model(folder_of(name, tmp_path, **fields), device="cuda")


def test_sglang_is_told_what_transformers_leaves_out_of_a_config(tmp_path: Path) -> None:
    told = FusedLayout.of(folder_of("deepseek-v3", tmp_path)).told
    assert told == {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    published = FusedLayout.of(folder_of("deepseek-v3", tmp_path, **told))
    assert published.told == {}
    settings = SGLangSettings(
        python=sys.executable, args={"json_model_override_args": '{"moe_layer_freq": 2}'}
    )
    words = server_command(settings, context_of(tmp_path, tmp_path), 0, told)
    overrides = json.loads(words[words.index("--json-model-override-args") + 1])
    assert overrides == {**told, "moe_layer_freq": 2}
    assert "--disable-shared-experts-fusion" in words


def test_latents_are_one_matrix_and_come_together_whatever_the_buckets(tmp_path: Path) -> None:
    layout = FusedLayout.of(folder_of("deepseek-v3", tmp_path))
    attention = "model.layers.0.self_attn."
    names = [f"{attention}{x}.weight" for x in ("kv_a_proj_with_mqa", "o_proj", "q_a_proj", "q_b_proj")]
    weights = {name: torch.full((3, 2), float(n)) for n, name in enumerate(names)}
    buckets = list(make_buckets(weights.items(), 1, layout.together))
    assert [[name for name, _ in bucket] for bucket in buckets] == [
        [names[1]],
        [names[0], names[2]],
        [names[3]],
    ]
    held = digests(weights, layout)
    joined = torch.cat([weights[names[2]], weights[names[0]]])  # queries first
    assert held[f"{attention}fused_qkv_a_proj_with_mqa.weight"] == sha256_hash(joined)


def test_a_cpu_server_pads_each_experts_size_to_its_blocks(tmp_path: Path) -> None:
    """16 to 32, and two shared experts of 16 to 64 together."""
    folder = folder_of("deepseek-v2", tmp_path)
    mlp = "model.layers.1.mlp."
    gate, up, down = (torch.randn(*shape) for shape in ((32, 4), (32, 4), (4, 32)))
    names = [f"{mlp}shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")]
    weights = dict(zip(names, (gate, up, down), strict=True))
    held = digests(weights, FusedLayout.of(folder, device="cpu"))
    zeros = torch.zeros(32, 4)
    assert held[f"{mlp}shared_experts.gate_up_proj.weight"] == sha256_hash(
        torch.cat([gate, zeros, up, zeros])
    )
    assert held[names[2]] == sha256_hash(torch.cat([down, zeros.T], 1))
    assert digests(weights, FusedLayout.of(folder, device="cuda"))[names[2]] == sha256_hash(down)


@pytest.mark.parametrize(
    ("name", "router"), [("glm-4.5", "float32"), ("glm-4.7-flash", "float32"), ("deepseek-v3", "bfloat16")]
)
def test_a_selection_bias_stays_float32_in_every_server_and_glms_router_too(
    name: str, router: str, tmp_path: Path
) -> None:
    layout, gate = FusedLayout.of(folder_of(name, tmp_path)), "model.layers.1.mlp.gate."
    assert layout.dtype_of(gate + "e_score_correction_bias", torch.bfloat16) == torch.float32
    assert layout.dtype_of(gate + "weight", torch.bfloat16) == getattr(torch, router)


def test_buckets_hold_the_stream_in_order_within_their_size() -> None:
    stream = [(f"t{n}", torch.zeros(n)) for n in (10, 10, 50, 5, 5, 5)]
    buckets = list(make_buckets(stream, most_bytes=80))
    assert [[name for name, _ in bucket] for bucket in buckets] == [
        ["t10", "t10"],
        ["t50"],
        ["t5", "t5", "t5"],
    ]


# --- settings ---


def test_a_missing_environment_is_named_with_how_to_build_it(tmp_path: Path) -> None:
    model = tiny_qwen3_moe(tmp_path / "model")
    python = str(tmp_path / "nowhere" / "python")
    engine = SGLangEngine(SGLangSettings(python=python), context_of(model, tmp_path))
    with pytest.raises(UserError, match=r"nowhere/python.*install_sglang\.sh"):
        engine.start()


def test_an_unreachable_url_is_named(tmp_path: Path) -> None:
    model = tiny_qwen3_moe(tmp_path / "model")
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    engine = SGLangEngine(SGLangSettings(urls=(url,)), context_of(model, tmp_path))
    with pytest.raises(UserError, match=url):
        engine.start()
    assert engine.health() == "the sglang engine is not started"


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    context = context_of(tiny_qwen3_moe(tmp_path / "model"), tmp_path)
    with pytest.raises(UserError, match=str(tmp_path / "config.json")):
        SGLangEngine(SGLangSettings(), replace(context, model_path=tmp_path))


def test_a_servers_command_line_says_what_the_settings_do(tmp_path: Path) -> None:
    context = context_of(tiny_qwen3_moe(tmp_path / "model"), tmp_path, dtype=torch.bfloat16, seed=5)
    settings = SGLangSettings(
        python=sys.executable,
        max_running_requests=4,
        pause_mode="in_place",
        args={"mem_fraction_static": 0.4, "log_requests": True},
    )
    words = server_command(settings, context, 2)
    assert words[:3] == [sys.executable, "-m", "sglang_cpu"]
    pairs = dict(itertools.pairwise(words))
    expected = {"--dtype": "bfloat16", "--context-length": "520", "--random-seed": "7"}
    expected |= {"--max-total-tokens": str(4 * 520), "--mem-fraction-static": "0.4"}
    assert {key: pairs[key] for key in expected} == expected
    assert {"--enable-return-routed-experts", "--disable-radix-cache", "--log-requests"} <= set(words)
    assert words[-1] == "--log-requests", "a user's words win over megarl's"
    there = server_command(settings, replace(context, device="cuda"), 2)
    assert there[there.index("--base-gpu-id") + 1] == "2"
    assert "--max-total-tokens" not in there
