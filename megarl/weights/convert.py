"""Hugging Face folder <-> megatron-core distributed checkpoint, weights alone, in either direction.

A converted Megatron folder also holds config.json and the tokenizer files, so that it can be turned back by itself.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.errors import UserError
from megarl.megatron.checkpoint import load_weights, save_weights
from megarl.megatron.groups import Groups, initialize, report_error_once
from megarl.megatron.model import build_model, check_fits
from megarl.megatron.platform import DTYPES, Platform
from megarl.megatron.settings import Layout, ModelSettings
from megarl.weights.assets import write_assets
from megarl.weights.checkpoint_files import (
    INDEX,
    CheckpointReader,
    HFConfig,
    read_config,
    write_checkpoint,
)
from megarl.weights.exchange import iter_hf_tensors, load
from megarl.weights.families import family_of
from megarl.weights.mapping import BareModel, NameMap


def kind_of(folder: Path) -> str:
    """Tell whether the folder is "huggingface" or "megatron". Raises UserError when it is neither."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if (folder / "metadata.json").is_file() and (folder / ".metadata").is_file():
        return "megatron"
    if (folder / INDEX).is_file() or next(folder.glob("*.safetensors"), None):
        return "huggingface"
    raise UserError(
        f"{folder}: neither a Hugging Face folder (no *.safetensors) nor a Megatron checkpoint (no metadata.json)"
    )


def check(source: Path, target: Path, config_folder: Path | None, layout: Layout) -> Path:
    """Refuse what can be refused before ranks are started; return the folder with the model's config.json."""
    kind = kind_of(source)
    if target.exists():
        raise UserError(f"{target}: exists already; name a new folder")
    folder = config_folder or source
    if kind == "megatron" and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json; name the Hugging Face folder that the model began from with --config"
        )
    config = read_config(folder)
    check_fits(family_of(config, source=str(folder / "config.json")).architecture(config), layout)
    return folder


@report_error_once()
def convert(source: Path, target: Path, *, layout: Layout, config_folder: Path | None, dtype: str) -> str:
    """Write `target` from `source`, in the other format. Collective. Returns one line that says what was done.

    dtype: "float32", "bfloat16", or "auto", which is what config.json says. Raises UserError for a folder, config or
    tensor that does not fit, and for a target that exists or cannot be written.
    """
    described_by = check(source, target, config_folder, layout)
    config = read_config(described_by)
    platform = Platform.detect()
    groups = initialize(layout, platform, seed=0)
    settings = ModelSettings.model_validate({"dtype": _dtype(config, dtype)})
    family = family_of(config)
    architecture = family.architecture(config)
    chunks = build_model(architecture, layout, platform, settings)
    name_map = NameMap(config, BareModel(architecture, layout, chunks))
    direction = kind_of(source)
    groups.barrier()  # nobody looks for the target any more
    if direction == "huggingface":
        load(name_map, CheckpointReader(source))
        _write_megatron(target, name_map, groups, described_by, config)
    else:
        load_weights(source, chunks)
        _write_huggingface(target, name_map, groups, described_by, config, DTYPES[settings.dtype])
    groups.barrier()
    tensors = sum(len(item.hf) for item in name_map.items)
    other = "Megatron checkpoint" if direction == "huggingface" else "Hugging Face folder"
    return f"{target}: {other}, {family.name}, {tensors} Hugging Face tensors, {settings.dtype}"


def _dtype(config: HFConfig, asked: str) -> str:
    """Return "float32" or "bfloat16". Raises UserError for another type."""
    name = asked
    if asked == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; set --dtype to {' or '.join(DTYPES)}")
    return name


def _write_megatron(
    target: Path, name_map: NameMap, groups: Groups, described_by: Path, config: HFConfig
) -> None:
    scratch = target.with_name(target.name + ".writing")
    with _user_errors(target):
        if groups.is_main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        groups.barrier()
        save_weights(scratch, name_map.model.chunks)
        groups.barrier()
        if groups.is_main:
            write_assets(scratch, config, model=described_by)
            scratch.rename(target)


@contextlib.contextmanager
def _user_errors(target: Path) -> Iterator[None]:
    """Turn the system's refusal to write `target` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from error


def _write_huggingface(
    target: Path,
    name_map: NameMap,
    groups: Groups,
    described_by: Path,
    config: HFConfig,
    dtype: torch.dtype,
) -> None:
    tensors = iter_hf_tensors(name_map)
    if groups.is_main:
        with _user_errors(target):
            write_checkpoint(target, tensors, config=config, assets=described_by, dtype=dtype)
    for _ in tensors:  # the other ranks' part of every gather
        pass
