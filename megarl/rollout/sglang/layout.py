"""How SGLang lays out a checkpoint in its memory, and how it hashes it: the proof that a sync arrived.

`POST /weights_checker {"action": "checksum"}` answers with one hash for each parameter that a rank holds.
SGLang fuses (q, k and v; gate and up; the experts of a layer), pads the vocabulary and shards before it
samples, so the trainer does the same to what it sends and compares hashes. What is followed here, of SGLang
0.5.23: `managers/mm_utils.py:tensor_hash`, `kernels/ops/memory/gpu_tensor_hash.py`, `layers/linear.py`,
`layers/vocab_parallel_embedding.py`, `layers/moe/fused_moe_triton/layer.py`. An SGLang that moves away from
it makes the digests differ, which is the side to err on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from megarl.errors import UserError

_STACKED = re.compile(r"(?P<module>.*)\.(?P<part>[qkv]|gate|up)_proj\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"(?P<module>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_ROWS = 64  # SGLang pads the vocabulary to a multiple of this
_CPU_BLOCK = 32  # on a CPU it pads a sharded intermediate size to a multiple of this, for each rank


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes: part `slot` of `slots` of the server's parameter `name`.

    split: the dimension that tensor parallelism shards, None when every rank holds the whole.
    """

    name: str
    slot: int = 0
    slots: int = 1
    split: int | None = None


@dataclass(frozen=True)
class FusedLayout:
    """The layout of one SGLang server for one checkpoint.

    kv_heads: with more ranks than key-value heads, each head is held by several ranks.
    experts: expert count of a MoE layer, 0 for a dense model.
    tied: the server has no output layer of its own (SGLang ties embeddings for dense models only).
    """

    kv_heads: int
    experts: int
    tied: bool
    tp_size: int = 1

    @classmethod
    def of(cls, model_path: Path, *, tp_size: int = 1, device: str = "cpu") -> FusedLayout:
        """The layout for this Hugging Face folder. Raises UserError for a layout that is not followed
        here.
        """
        config = read_config(model_path)
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        if device == "cpu" and tp_size > 1:
            for key in ("intermediate_size", "moe_intermediate_size"):
                if config.get(key) and config[key] % (_CPU_BLOCK * tp_size):
                    raise UserError(
                        f"{model_path}/config.json: with tp_size={tp_size} on a CPU, SGLang pads {key}="
                        f"{config[key]} to a multiple of {_CPU_BLOCK * tp_size}, and a weight sync could not "
                        f"be proved. Use tp_size=1."
                    )
        return cls(
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            experts=experts,
            tied=bool(config.get("tie_word_embeddings")) and not experts,
            tp_size=tp_size,
        )

    def place(self, name: str) -> Place | None:
        """Where the checkpoint tensor `name` goes; None if the server does not hold it."""
        if name == "lm_head.weight" and self.tied:
            return None
        if expert := _EXPERT.fullmatch(name):
            index = int(expert["expert"])
            if expert["part"] == "down":
                return Place(f"{expert['module']}.w2_weight", index, self.experts, split=1)
            slot = 2 * index + (expert["part"] == "up")
            return Place(f"{expert['module']}.w13_weight", slot, 2 * self.experts, split=0)
        if stacked := _STACKED.fullmatch(name):
            attention = stacked["part"] in "qkv"
            parts = ("q", "k", "v") if attention else ("gate", "up")
            fused = f"{stacked['module']}.{'qkv' if attention else 'gate_up'}_proj.{stacked['kind']}"
            return Place(fused, parts.index(stacked["part"]), len(parts), split=0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return Place(name, split=1)
        return Place(name, split=0 if name.endswith(_VOCABULARY) else None)

    def shard(self, name: str, tensor: torch.Tensor, place: Place, rank: int) -> torch.Tensor:
        """What tensor-parallel rank `rank` holds of this whole checkpoint tensor."""
        if name.endswith(_VOCABULARY):
            tensor = self._pad_vocabulary(tensor)
        if place.split is None or self.tp_size == 1:
            return tensor
        ranks, index = self.tp_size, rank
        if re.search(r"\.[kv]_proj\.", name) and self.tp_size > self.kv_heads:
            ranks, index = self.kv_heads, rank // (self.tp_size // self.kv_heads)
        return tensor.chunk(ranks, dim=place.split)[index]

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
        self._parts: dict[str, dict[int, tuple[str, torch.Tensor]]] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor of the stream: whole, in the dtype of the server."""
        place = self._layout.place(name)
        if place is None:
            return
        parts = self._parts.setdefault(place.name, {})
        if place.slot in parts or self.key(place.name, 0) in self._digests:
            raise ValueError(f"weight stream: {name!r} came twice")
        parts[place.slot] = (name, tensor)
        if len(parts) < place.slots:
            return
        del self._parts[place.name]
        for rank in range(self._layout.tp_size):
            shards = [self._layout.shard(*parts[slot], place, rank) for slot in sorted(parts)]
            whole = torch.cat([shard.contiguous() for shard in shards]) if len(shards) > 1 else shards[0]
            self._digests[self.key(place.name, rank)] = self._hash(whole)

    def finish(self) -> dict[str, str]:
        """All digests. Raises ValueError if the stream ended before every part of a fused tensor came."""
        if self._parts:
            held = [name for parts in self._parts.values() for name, _ in parts.values()]
            raise ValueError(
                f"weight stream: it ended with incomplete {', '.join(sorted(self._parts))}; there came only "
                f"{', '.join(sorted(held))}"
            )
        return self._digests

    def key(self, name: str, rank: int) -> str:
        return digest_key(name, rank, self._layout.tp_size)


def digest_key(name: str, rank: int, tp_size: int) -> str:
    """Names a digest: the server's parameter name, and the rank when there are several."""
    return name if tp_size == 1 else f"{name}@tp{rank}"


def expected_names(model_path: Path, layout: FusedLayout) -> set[str]:
    """The parameter names a server must hold for this checkpoint, from the headers of its safetensors files.

    Empty if the folder has none.
    """
    names: set[str] = set()
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if place := layout.place(name):
                    names |= {digest_key(place.name, rank, layout.tp_size) for rank in range(layout.tp_size)}
    return names


def read_config(model_path: Path) -> Mapping[str, Any]:
    """`config.json` of a Hugging Face folder. Raises UserError if it cannot be read."""
    file = model_path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: is {model_path} a Hugging Face model folder?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return config.get("text_config") or config


def sha256_hash(tensor: torch.Tensor) -> str:
    """SGLang's hash of a tensor on a CPU: the first 8 bytes of the SHA-256 of its memory, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def gpu_hash(tensor: torch.Tensor) -> str:
    """SGLang's hash of a tensor on CUDA (`gpu_tensor_hash`), as torch operations for any device.

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
    """int64 [tiles], each the sum modulo 2^32 of the mixed words of a tile."""
    at = index & _M32
    rotated = ((at << rotation) | (at >> (32 - rotation))) & _M32
    mixed = _mix(words ^ ((at * position + seed) & _M32) ^ rotated)
    padded = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE))
    return padded.view(-1, _TILE).sum(dim=1) & _M32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, on int64 values below 2^32."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _M32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _M32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
