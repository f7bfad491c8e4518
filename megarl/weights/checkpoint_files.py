"""A Hugging Face checkpoint folder: reading its tensors one at a time, writing it shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import UserError, system_errors
from megarl.weights.assets import write_assets

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLE_BYTES = 1 << 16
KEPT_FLOAT32 = ("e_score_correction_bias",)  # ends of names: routers add it to float32 scores

# Layers that no family trains or writes.
MULTI_TOKEN_PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers")

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)  # whole numbers from 1
COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "n_group",
    "topk_group",
    *MULTI_TOKEN_PREDICTION,
)  # whole numbers from 0
LISTS = ("architectures", "layer_types", "mlp_layer_types", "mlp_only_layers")


class HFConfig(dict[str, Any]):
    """`config.json`; a key that is asked for and missing or null is the user's error."""

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise UserError(f"config.json: key {key!r} is {'null' if key in self else 'missing'}")
        return value


def read_config(folder: Path) -> HFConfig:
    """Read the folder's `config.json`. Raises UserError when it is missing or not JSON, and for a size that is none."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; model.path must be a Hugging Face checkpoint folder")
    if not path.is_file():
        raise UserError(f"{path}: not found; {folder} is no Hugging Face checkpoint folder")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    _check_kinds(path, values)
    return HFConfig(values)


def _check_kinds(path: Path, values: Mapping[str, Any]) -> None:
    """Check what every family reads: each key is null, or of its kind."""
    for names, least in ((SIZES, 1), (COUNTS, 0)):
        for key in names:
            value = values.get(key)
            if value is not None and (type(value) is not int or value < least):
                raise UserError(f"{path}: {key} is {value!r}, it must be a whole number from {least}")
    for key in LISTS:
        if not isinstance(values.get(key, []), list | None):
            raise UserError(f"{path}: {key} is {values[key]!r}, it must be a list")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key), dict | None):
            raise UserError(f"{path}: {key} is {values[key]!r}, it must be an object")


def digest_of_folder(folder: Path) -> str:
    """32 hex digits by which a checkpoint folder is recognised wherever it lies: of its config.json, and of size, head,
    middle and end of each file of weights, so that a large one is not read whole."""
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class CheckpointReader:
    """The tensors of an HF folder by name. Making one reads every file's header; no tensor is read before it is
    asked for.

    Raises UserError that names a file that is missing, unreadable, truncated or no safetensors, a tensor that the index
    promises and its file lacks, one that two files hold, and a whole checkpoint beside an index that is of another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            self.files = _weight_map(index)
            if (folder / WHOLE).is_file() and WHOLE not in self.files.values():
                raise UserError(
                    f"{folder}: holds {WHOLE} and {INDEX}, which does not name it: two checkpoints, and engines differ "
                    "in which they read; remove one of them"
                )
        else:
            self.files = {}
            for path in sorted(folder.glob("*.safetensors")):
                for name in _header(path):
                    if (other := self.files.setdefault(name, path.name)) != path.name:
                        raise UserError(
                            f"{folder}: tensor {name!r} is in {other} and in {path.name}; remove the file that does "
                            "not belong here"
                        )
            if not self.files:
                raise UserError(
                    f"{folder}: no *.safetensors file; convert the checkpoint to safetensors first"
                )
        headers = {file: _header(folder / file) for file in sorted(set(self.files.values()))}
        for name, file in self.files.items():
            if name not in headers[file]:
                raise UserError(f"{folder / file}: tensor {name!r} is missing, although {INDEX} promises it")
        self._headers = {name: headers[file][name] for name, file in self.files.items()}

    def names(self) -> set[str]:
        return set(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name][1]

    def kind(self, name: str) -> str:
        """Return a tensor's dtype as safetensors writes it: F32, BF16, I8 ..."""
        return self._headers[name][0]

    def same(self, one: str, other: str) -> bool:
        """Tell whether two tensors hold the same numbers, without ever holding a whole one."""
        if self.shape(one) != self.shape(other):
            return False
        paths = [self.folder / self.files[name] for name in (one, other)]
        with safe_open(paths[0], framework="pt") as a, safe_open(paths[1], framework="pt") as b:
            left, right = a.get_slice(one), b.get_slice(other)
            rows = range(0, self.shape(one)[0], 4096)
            return all(torch.equal(left[n : n + 4096], right[n : n + 4096]) for n in rows)

    def read(self, name: str) -> Tensor:
        """Read one whole tensor. Raises UserError when the checkpoint lacks it."""
        if name not in self.files:
            raise UserError(f"{self.folder}: tensor {name!r} is missing")
        path = self.folder / self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: tensor {name!r} cannot be read ({error})") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of tensors (a JSON object with 'weight_map')") from error


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read dtype and shape by tensor name; safetensors itself compares the header with the file's size."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing, although {INDEX} names it") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file, perhaps truncated ({error})") from error


def write_checkpoint(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any],
    assets: Path,
    dtype: torch.dtype,
    model: Path | None = None,
    chat_template: str | None = None,
    stops: Sequence[int] = (),
    shard_bytes: int = 4 << 30,
) -> None:
    """Write `folder` (made anew, atomically: nothing half-written ever bears its name).

    tensors: whole tensors by HF name, streamed: at most one file's worth is in memory. dtype: of all but
    KEPT_FLOAT32. assets: the tokenizer's folder; model, chat_template, stops: as in `write_assets`. Raises OSError
    where the system refuses to write.
    """
    scratch = folder.with_name(folder.name + ".writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = size = count = 0

    def flush() -> None:
        nonlocal held, size, count
        if held:
            count += 1
            file = f"part-{count:05d}.safetensors"
            with system_errors():
                save_file(held, scratch / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(held, file))
            held, size = {}, 0

    for name, tensor in tensors:
        kept = torch.float32 if name.endswith(KEPT_FLOAT32) else dtype
        value = tensor.detach().to("cpu", kept).contiguous()
        held[name] = value.clone() if value.data_ptr() == tensor.data_ptr() else value
        size += value.nbytes
        total += value.nbytes
        if size >= shard_bytes:
            flush()
    flush()
    names = [WHOLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    final = {f"part-{n:05d}.safetensors": name for n, name in enumerate(names, 1)}
    for old, new in final.items():
        (scratch / old).rename(scratch / new)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: final[f] for n, f in weight_map.items()},
        }
        (scratch / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    settings = {**config, "dtype": str(dtype).removeprefix("torch.")}
    settings.pop("torch_dtype", None)
    for key in MULTI_TOKEN_PREDICTION:
        if settings.get(key):
            settings[key] = 0
    write_assets(
        scratch,
        settings,
        model=model or assets,
        tokenizer=assets,
        chat_template=chat_template,
        stops=stops,
    )
    for file in final.values():  # safetensors lets nobody but the owner read what it writes
        shutil.copymode(scratch / "config.json", scratch / file)
    if folder.exists():
        shutil.rmtree(folder)
    scratch.rename(folder)
