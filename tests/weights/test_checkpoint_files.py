"""Checkpoint folders that are damaged, incomplete or not what config.json says: each is told by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import UserError
from megarl.weights.checkpoint_files import INDEX, CheckpointReader, read_config, write_checkpoint
from megarl.weights.families import family_of
from tests.disk import full_disk
from tests.ranks import RankPool
from tests.weights.families import config_of, make
from tests.weights.jobs import load_job, memory_job

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3-moe", tmp_path_factory.mktemp("whole") / "moe")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint in one file, to be damaged."""
    return shutil.copytree(whole, tmp_path / "moe")


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def drop_a_norm(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(NORM))


def add_a_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update(extra=torch.zeros(1)))


def reshape_a_norm(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({NORM: torch.zeros(31)}))


def fewer_vocabulary_rows(folder: Path) -> None:
    configure(folder, vocab_size=100)


def swap_q_and_k_sizes(folder: Path) -> None:
    """Fused, they would have the right number of rows."""

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        q, k = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk")
        tensors[q], tensors[k] = tensors[k], tensors[q]

    change(folder, swap)


def more_layers(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)


def fewer_experts(folder: Path) -> None:
    configure(folder, num_experts=4, num_local_experts=4)


def dense_instead(folder: Path) -> None:
    configure(folder, mlp_only_layers=[0, 1])


def quantize_a_norm(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}))


def tie_what_differs(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (drop_a_norm, rf"1 tensor\(s\) missing .* first '{NORM}'"),
    (add_a_tensor, r"1 tensor\(s\) that config.json does not call for, first 'extra'"),
    (reshape_a_norm, rf"'{NORM}' is \[31\], config.json calls for \[32\]"),
    (fewer_vocabulary_rows, r"'model.embed_tokens.weight' is \[101, 32\], config.json calls for \[100, 32\]"),
    (swap_q_and_k_sizes, r"'model.layers.0.self_attn.q_proj.weight' is \[32, 32\], .* calls for \[64, 32\]"),
    (more_layers, r"missing that config.json calls for, first 'model.layers.2."),
    (fewer_experts, r"does not call for, first 'model.layers.1.mlp.experts.4."),
    (quantize_a_norm, rf"'{NORM}' is I8: quantized weights are not supported"),
    (tie_what_differs, r"tie_word_embeddings is true, but 'lm_head.weight' differs from 'model.embed_tokens"),
    (dense_instead, r"missing that config.json calls for, first 'model.layers.1.mlp.gate_proj"),
]


@pytest.mark.distributed
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_name(
    ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    folders = {}
    for damage, _ in DAMAGE:
        folders[damage.__name__] = shutil.copytree(whole, tmp_path / damage.__name__)
        damage(folders[damage.__name__])
    told = ranks.run(1, load_job, folders={**folders, "whole": whole}, layout={}, timeout=240)[0]
    assert told.pop("whole") is None
    for damage, message in DAMAGE:
        assert re.search(message, told[damage.__name__] or "nothing"), told[damage.__name__]


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"model\.safetensors: not a readable safetensors file, perhaps truncated"
    ):
        CheckpointReader(folder)


def test_an_empty_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file"):
        CheckpointReader(folder)


def test_an_index_that_names_an_absent_file_is_refused(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    weight_map = dict.fromkeys(names, "model.safetensors") | {NORM: "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        UserError, match=rf"model-00002-of-00002\.safetensors: missing, although {INDEX} names it"
    ):
        CheckpointReader(folder)


def test_an_index_may_name_files_in_a_subfolder(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts" / "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "parts/one.safetensors")}))
    assert torch.equal(CheckpointReader(folder).read(NORM), names[NORM])


def test_a_tensor_that_two_files_hold_is_refused(folder: Path) -> None:
    save_file({NORM: torch.zeros(32)}, folder / "stray.safetensors")
    with pytest.raises(UserError, match=rf"'{NORM}' is in model\.safetensors and in stray\.safetensors"):
        CheckpointReader(folder)


def test_a_whole_checkpoint_beside_the_index_of_another_is_refused(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    save_file(names, folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")})
    )
    with pytest.raises(UserError, match=rf"holds model\.safetensors and {INDEX}, which does not name it"):
        CheckpointReader(folder)


def test_a_folder_in_place_of_a_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors: "):
        CheckpointReader(folder)


def test_an_index_that_promises_too_much_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"ghost": "model.safetensors"}}))
    with pytest.raises(UserError, match=rf"tensor 'ghost' is missing, although {INDEX} promises it"):
        CheckpointReader(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(UserError, match="not an index of tensors"):
        CheckpointReader(folder)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors file"):
        CheckpointReader(folder)


def test_a_config_is_refused_that_is_missing_broken_or_lacks_a_key(folder: Path) -> None:
    config = folder / "config.json"
    values = json.loads(config.read_text())
    del values["hidden_size"]
    config.write_text(json.dumps(values))
    with pytest.raises(UserError, match="key 'hidden_size' is missing"):
        family_of(read_config(folder)).architecture(read_config(folder))
    for text, message in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        config.write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(folder)
    config.unlink()
    with pytest.raises(UserError, match="not found"):
        read_config(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_attention_heads": "4"},
            r"config\.json: num_attention_heads is '4', it must be a whole number from 1",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 32.5}, r"hidden_size is 32\.5"),
        ({"num_experts": -1}, "num_experts is -1, it must be a whole number from 0"),
        (
            {"architectures": "Qwen3MoeForCausalLM"},
            "architectures is 'Qwen3MoeForCausalLM', it must be a list",
        ),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', it must be an object"),
        ({"hidden_size": None}, "key 'hidden_size' is null"),
    ],
)
def test_a_config_value_of_the_wrong_kind_is_named(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    configure(folder, **values)
    with pytest.raises(UserError, match=message):
        family_of(read_config(folder)).architecture(read_config(folder))


def test_an_unknown_architecture_is_told_with_the_nearest_known() -> None:
    with pytest.raises(
        UserError, match=r"Qwen3MoEForCausalLM is not supported. Did you mean 'Qwen3MoeForCausalLM'"
    ):
        family_of({"architectures": ["Qwen3MoEForCausalLM"]})
    with pytest.raises(UserError, match="'architectures' is missing"):
        family_of({})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        r"rope_parameters\.rope_type: 'yarn'",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias: True"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: 'fp8'"),
    ("qwen2.5", {"use_sliding_window": True, "sliding_window": 128}, "sliding_window: 128"),
    ("qwen2.5", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("mixtral", {"sliding_window": 256}, "sliding_window: 256"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
    ("llama-3", {"mlp_bias": True}, "mlp_bias: True"),
    (
        "llama-3",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0}},
        r"rope_parameters\.high_freq_factor: 2\.0",
    ),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob: True"),
    ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob: False"),
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave: False"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
    (
        "deepseek-v3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}, "rope_parameters": None},
        r"rope_scaling\.attention_factor: 1\.0",
    ),
    ("glm-4.5", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1"),
    ("glm-4.5", {"n_routed_experts": None, "num_local_experts": None}, "says no number of experts"),
    ("mixtral", {"num_local_experts": 0}, "says no number of experts"),
]


@pytest.mark.parametrize(("family", "values", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_setting_that_megarl_cannot_honour_is_refused_by_its_key(
    family: str, values: dict[str, Any], message: str
) -> None:
    config = config_of(family)
    family_of(config).architecture(config)
    with pytest.raises(UserError, match=message):
        family_of(config).architecture({**config, **values})


def test_the_older_spelling_of_rotary_settings_means_the_same() -> None:
    new = config_of("deepseek-v3")
    numbers = dict(new["rope_parameters"])
    old = {**new, "rope_theta": numbers.pop("rope_theta"), "rope_parameters": None}
    numbers["type"] = numbers.pop("rope_type")
    old["rope_scaling"] = numbers
    assert family_of(new).architecture(new) == family_of(old).architecture(old)


@pytest.mark.distributed
def test_layers_of_multi_token_prediction_are_left_out(ranks: RankPool, tmp_path: Path) -> None:
    folder = make("glm-4.5", tmp_path / "glm")
    change(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}))
    configure(folder, num_nextn_predict_layers=1)
    other = shutil.copytree(folder, tmp_path / "other")
    configure(other, num_nextn_predict_layers=0)
    told = ranks.run(1, load_job, folders={"with": folder, "without": other}, layout={}, timeout=240)[0]
    assert told["with"] is None
    assert "first 'model.layers.3.eh_proj.weight'" in told["without"]
    written = tmp_path / "written"
    write_checkpoint(written, (), config=read_config(folder), assets=folder, dtype=torch.float32)
    assert read_config(written)["num_nextn_predict_layers"] == 0


def test_a_full_disk_is_an_error_of_the_system_and_leaves_no_folder(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_checkpoint(
            tmp_path / "target", [("w", torch.zeros(9999))], config={}, assets=tmp_path, dtype=torch.float32
        )
    assert not (tmp_path / "target").exists()


def test_writing_makes_shards_an_index_and_the_files_beside_them(whole: Path, tmp_path: Path) -> None:
    source = shutil.copytree(whole, tmp_path / "source")
    for name in ("tokenizer.json", "generation_config.json"):
        (source / name).write_text("{}")
    tensors = load_file(source / "model.safetensors")
    target = tmp_path / "target"
    write_checkpoint(
        target,
        tensors.items(),
        config=read_config(source),
        assets=source,
        dtype=torch.float32,
        shard_bytes=20_000,
    )
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 50_000 for file in files)
    assert {file.stat().st_mode for file in files} == {(target / "config.json").stat().st_mode}
    index = json.loads((target / INDEX).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {p.name for p in target.iterdir()}
    reader = CheckpointReader(target)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor), name


def test_a_selection_bias_stays_float32_in_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    folder = make("moonlight", tmp_path / "moonlight")
    tensors = load_file(folder / "model.safetensors")
    write_checkpoint(
        tmp_path / "target", tensors.items(), config=read_config(folder), assets=folder, dtype=torch.bfloat16
    )
    written = load_file(tmp_path / "target" / "model.safetensors")
    biases = [name for name in written if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for name, tensor in written.items():
        assert tensor.dtype == (torch.float32 if name in biases else torch.bfloat16), name
    assert torch.equal(written[biases[0]], tensors[biases[0]])


@pytest.mark.distributed
def test_loading_holds_no_more_than_the_shard_and_one_tensor(ranks: RankPool, tmp_path: Path) -> None:
    """Resident memory at its peak, against before loading, with the parameters in place already."""
    folder = make(
        "qwen3",
        tmp_path / "large",
        vocab_size=16_001,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=6,
    )
    size = (folder / "model.safetensors").stat().st_size
    one = 16_001 * 512 * 4
    assert size > 7 * one
    for rank in ranks.run(2, memory_job, folder=folder, layout={"tensor": 2}, timeout=240):
        assert rank["growth"] < 1.5 * one, rank
