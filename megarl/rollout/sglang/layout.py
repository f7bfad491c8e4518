"""How SGLang lays out a checkpoint in its memory, and how it hashes it: the proof that a sync arrived.

`POST /weights_checker {"action": "checksum"}` answers with one hash for each parameter that a rank holds.
SGLang fuses (q, k and v; gate and up; the experts of a layer), pads the vocabulary and shards before it
samples, so the trainer does the same to what it sends and compares hashes. What is fused with what, a family declares
(`megarl/weights/families/`); padding, sharding and hashing are the same for all. What is followed here, of SGLang
0.5.23: `managers/mm_utils.py:tensor_hash`, `kernels/ops/memory/gpu_tensor_hash.py`, `layers/linear.py`,
`layers/vocab_parallel_embedding.py`, `layers/moe/fused_moe_triton/layer.py`. An SGLang that moves away from
it makes the digests differ, which is the side to err on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megarl.errors import UserError
from megarl.megatron.architecture import Architecture
from megarl.weights.checkpoint_files import CheckpointReader, read_config
from megarl.weights.families import family_of
from megarl.weights.families.base import WHOLE, Item, expand
from megarl.weights.transforms import Copy, FuseQKV, PadVocabulary

HEAD = "lm_head.weight"
_VOCABULARY_ROWS = 64  # SGLang pads the vocabulary to a multiple of this
_CPU_BLOCK = 32  # on a CPU it pads a sharded intermediate size to a multiple of this, for each rank
_CPU_PADDED = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class Part:
    """Where a checkpoint tensor lies: it is part `number` of the `count` parts of the server's parameter `name`.

    transform: how tensor parallelism splits it, as in the family's name map. together: the server takes the
    parameter's parts from one request alone. unit: the intermediate size that it has once or several times along the
    split axis, None if it has none. float32: the server holds it so, whatever its dtype.
    """

    name: str
    number: int = 0
    count: int = 1
    transform: Copy = WHOLE
    together: bool = False
    unit: int | None = None
    float32: bool = False


def parts_of(config: Mapping[str, Any], *, source: str) -> dict[str, Part]:
    """Return the part of every checkpoint tensor by its name, from what the model's family declares.

    Raises UserError for a family that doesn't declare how SGLang lays it out.
    """
    family = family_of(config, source=source)
    if not family.sglang:
        raise UserError(
            f"engine.kind: sglang doesn't know how SGLang lays out {family.name} ({source}), so a weight sync could "
            "not be proved: use the embedded engine"
        )
    architecture = family.architecture(config)
    parts = {}
    for item in expand(family.entries(config, architecture), architecture):
        for n, name in enumerate(item.hf):
            number, count = n, len(item.hf)
            if item.sglang is not None and item.expert is not None:
                number, count = item.expert * count + n, architecture.num_experts * count
            elif item.sglang_rows is not None:
                number, count = item.sglang_rows[0] + n, item.sglang_rows[1]
            together, unit = item.sglang_rows is not None, _intermediate_size(item, config, architecture)
            held = item.sglang or name
            parts[name] = Part(held, number, count, item.transform, together, unit, item.sglang_float32)
    return parts


def _intermediate_size(item: Item, config: Mapping[str, Any], architecture: Architecture) -> int | None:
    shape, shared = architecture.transformer, ".shared_experts." in item.name
    if ".linear_fc" not in item.name:
        return None
    if item.expert is not None or (shared and config.get("n_shared_experts")):
        return int(shape["moe_ffn_hidden_size"])
    return int(shape["moe_shared_expert_intermediate_size" if shared else "ffn_hidden_size"])


@dataclass(frozen=True)
class FusedLayout:
    """The layout of one SGLang server for one checkpoint.

    parts: by checkpoint name. tied: the server has no output layer of its own. told: what its config must say beside
    the folder's config.json. padded: the server pads as SGLang does on a CPU: intermediate sizes to blocks; and ranks
    that outnumber the key-value heads, or share them unevenly, get heads of zeros with the queries that belong to
    them (elsewhere several ranks hold the same head).
    """

    parts: Mapping[str, Part]
    tied: bool
    tp_size: int = 1
    told: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False

    @classmethod
    def of(cls, model_path: Path, *, tp_size: int = 1, device: str = "cpu") -> FusedLayout:
        """Return the layout for this Hugging Face folder. Raises UserError for one that is not followed here."""
        config, file = read_config(model_path), model_path / "config.json"
        if device == "cpu" and tp_size > 1:
            for key in _CPU_PADDED:
                if config.get(key) and config[key] % (_CPU_BLOCK * tp_size):
                    raise UserError(
                        f"{file}: with tensor_parallel={tp_size} on a CPU, SGLang pads {key}={config[key]} to a "
                        f"multiple of {_CPU_BLOCK * tp_size}, and a weight sync could not be proved. Use "
                        "tensor_parallel=1."
                    )
        parts, family = parts_of(config, source=str(file)), family_of(config)
        told = family.sglang_config(config, family.architecture(config))
        missing = {key: value for key, value in told.items() if config.get(key) != value}
        return cls(parts, bool(config.get("tie_word_embeddings")), tp_size, missing, device == "cpu")

    def part(self, name: str) -> Part | None:
        """Return where the checkpoint tensor `name` lies; None if the server does not hold it."""
        return None if name == HEAD and self.tied else self.parts.get(name, Part(name))

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a server of dtype `dtype` holds the checkpoint tensor `name`."""
        part = self.part(name)
        return torch.float32 if part is not None and part.float32 else dtype

    def together(self, name: str) -> tuple[str, int] | None:
        """Return the parameter that `name` is loaded into and of how many tensors, if they must come in one request."""
        part = self.part(name)
        return (part.name, part.count) if part is not None and part.together else None

    def shard(self, tensor: torch.Tensor, part: Part, rank: int) -> torch.Tensor:
        """Return what tensor-parallel rank `rank` holds of this whole checkpoint tensor."""
        transform = part.transform
        if isinstance(transform, PadVocabulary):
            tensor = self._pad_vocabulary(tensor)
        if self.padded and part.unit is not None and transform.axis is not None:
            tensor = _pad_units(tensor, transform.axis, part.unit)
        if transform.axis is None or self.tp_size == 1:
            return tensor
        ranks, index = self.tp_size, rank
        if (heads := self._key_heads(part)) and self.padded:
            padded = _round_up(heads, self.tp_size)
            shape = list(tensor.shape)
            shape[transform.axis] = shape[transform.axis] // heads * (padded - heads)
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim=transform.axis)
        elif isinstance(transform, FuseQKV) and part.number > 0 and self.tp_size > transform.groups:
            ranks, index = transform.groups, rank // (self.tp_size // transform.groups)
        return tensor.chunk(ranks, dim=transform.axis)[index]

    def _key_heads(self, part: Part) -> int:
        """Key-value heads of the attention that this is a projection of; 0 for anything else."""
        fused = self.parts.get(part.name.replace(".o_proj.weight", ".q_proj.weight"), part)
        return fused.transform.groups if isinstance(fused.transform, FuseQKV) else 0

    def key(self, name: str, rank: int) -> str:
        """Name a digest: the server's parameter name, and the rank when there are several."""
        return name if self.tp_size == 1 else f"{name}@tp{rank}"

    def _pad_vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = _round_up(len(tensor), _VOCABULARY_ROWS)
        if rows % self.tp_size:
            rows = _round_up(len(tensor), _VOCABULARY_ROWS * self.tp_size)
        return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


class FusedDigests:
    """Digests of a stream of checkpoint tensors, in the server's layout. Holds the parts of unfinished layers
    only.

    device: the server's; SGLang hashes with SHA-256 on a CPU and with a kernel of its own on CUDA.
    """

    def __init__(self, layout: FusedLayout, device: Literal["cpu", "cuda"]) -> None:
        self._layout = layout
        self._hash = sha256_hash if device == "cpu" else gpu_hash
        self._parts: dict[str, dict[int, tuple[str, Part, torch.Tensor]]] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor of the stream: whole, in the dtype of the server."""
        part = self._layout.part(name)
        if part is None:
            return
        parts = self._parts.setdefault(part.name, {})
        if part.number in parts or self._layout.key(part.name, 0) in self._digests:
            raise ValueError(f"weight stream: {name!r} came twice")
        parts[part.number] = (name, part, tensor)
        if len(parts) < part.count:
            return
        del self._parts[part.name]
        for rank in range(self._layout.tp_size):
            shards = [
                self._layout.shard(tensor, part, rank) for _, (_, part, tensor) in sorted(parts.items())
            ]
            whole = torch.cat([shard.contiguous() for shard in shards]) if len(shards) > 1 else shards[0]
            self._digests[self._layout.key(part.name, rank)] = self._hash(whole)

    def finish(self) -> dict[str, str]:
        """Return all digests. Raises ValueError if the stream ended before every part of a fused tensor came."""
        if self._parts:
            held = [name for parts in self._parts.values() for name, _, _ in parts.values()]
            raise ValueError(
                f"weight stream: it ended with incomplete {', '.join(sorted(self._parts))}; there came only "
                f"{', '.join(sorted(held))}"
            )
        return self._digests


def check_variant(model_path: Path) -> None:
    """Raise UserError for a Hugging Face folder whose model SGLang would sample otherwise than megarl trains it."""
    config = read_config(model_path)
    family = family_of(config, source=str(model_path / "config.json"))
    family.sglang_check(config, family.architecture(config))


def expected_names(model_path: Path, layout: FusedLayout) -> set[str]:
    """Return the names of the digests that a server must have for this checkpoint. Only file headers are read."""
    parts = filter(None, map(layout.part, CheckpointReader(model_path).names()))
    return {layout.key(part.name, rank) for part in parts for rank in range(layout.tp_size)}


def sha256_hash(tensor: torch.Tensor) -> str:
    """Compute SGLang's hash of a tensor on a CPU: the first 8 bytes of the SHA-256 of its memory, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def gpu_hash(tensor: torch.Tensor) -> str:
    """Compute SGLang's hash of a tensor on CUDA (`gpu_tensor_hash`) by torch operations for any device.

    Each tile of 8192 32-bit words gets two 32-bit sums of mixed words; the tiles' 64-bit values are added and
    mixed once more. Arithmetic is modulo 2^32, held in int64.
    """
    words = _as_words(tensor)
    total = 0
    for start in range(0, len(words), _TILE * _TILES_AT_ONCE):
        chunk = words[start : start + _TILE * _TILES_AT_ONCE].to(torch.int64) & _M32
        index = torch.arange(start, start + len(chunk), device=chunk.device)
        high = _tile_sums(chunk, index, _SEED_1, _POSITION_1, 15)
        low = _tile_sums(chunk, index, _SEED_2, _POSITION_2, 13)
        size = (4 * len(words)) & _M32
        high, low = _mix(high ^ size), _mix(low ^ size)
        # Python's integers add the tiles, by halves that cannot overflow int64.
        total += (int(high.sum()) << 32) + int(low.sum())
    return f"{_splitmix64(total & _M64) if len(words) else 0:016x}"


_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_TILE = 8192
_TILES_AT_ONCE = 512  # 16 MiB of weights, 32 MiB for each int64 temporary
_SEED_1 = 0x243F6A88
_SEED_2 = ((_SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & _M32
_POSITION_1, _POSITION_2 = 0x27D4EB2D, 0x165667B1


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % 4:
        flat = torch.cat([flat, flat.new_zeros(4 - len(flat) % 4)])
    return flat.view(torch.int32)


def _tile_sums(
    words: torch.Tensor, index: torch.Tensor, seed: int, position: int, rotation: int
) -> torch.Tensor:
    """Return int64 [tiles], each the sum modulo 2^32 of the mixed words of a tile."""
    at = index & _M32
    rotated = ((at << rotation) | (at >> (32 - rotation))) & _M32
    mixed = _mix(words ^ ((at * position + seed) & _M32) ^ rotated)
    padded = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE))
    return padded.view(-1, _TILE).sum(dim=1) & _M32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply MurmurHash3's 32-bit finalizer to int64 values below 2^32."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _M32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _M32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _pad_units(tensor: torch.Tensor, axis: int, unit: int) -> torch.Tensor:
    """Return the matrix with as many zeros behind `axis` as if each of its units were padded to the CPU's blocks."""
    more = tensor.shape[axis] // unit * (_round_up(unit, _CPU_BLOCK) - unit)
    return torch.nn.functional.pad(tensor, (0, more) if axis == 1 else (0, 0, 0, more))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
