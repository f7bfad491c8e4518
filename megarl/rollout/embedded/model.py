"""A `transformers` language model: run on sequences of unequal lengths, its weights named as on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.core_model_loading import revert_weight_conversion

from megarl.errors import UserError


@dataclass(eq=False)
class Prefilled:
    """logits float32 [rows, vocabulary] at each row's last token; keys, values [layers, rows, kv_heads, n,
    head_dim]; routes int64 [rows, n, moe_layers, top_k], if asked for."""

    logits: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    routes: torch.Tensor | None


class KVCache:
    """Keys and values of the running rows, each [layers, slots, kv_heads, capacity, head_dim].

    Row r of the batch lives in slot r; its token at position p in column p. Columns past a row's length hold
    finite leftovers that the attention mask hides.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: int, longest: int):
        """Make an empty cache, which doubles when it must grow. slots, longest: what it may grow to."""
        self.slots, self.longest = slots, longest
        self.rows = self.columns = self.used = 0

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the first columns of these rows (int64 [rows]); keys and values as in `Prefilled`."""
        n = keys.shape[3]
        if not self.rows:
            self.keys, self.values = keys[:, :0, :, :0], values[:, :0, :, :0]
        self.fit(int(rows.max()) + 1, n)
        self.keys[:, rows, :, :n], self.values[:, rows, :, :n] = keys, values

    def fit(self, rows: int, length: int) -> None:
        """Make room for slots 0 .. rows - 1 and columns 0 .. length - 1."""
        self.used = max(self.used, length)
        taller = min(self.slots, max(rows, 2 * self.rows)) - self.rows if rows > self.rows else 0
        wider = (
            min(self.longest, max(length, 2 * self.columns)) - self.columns if length > self.columns else 0
        )
        if taller or wider:
            grow = (0, 0, 0, wider, 0, 0, 0, taller)
            self.keys, self.values = F.pad(self.keys, grow), F.pad(self.values, grow)
            self.rows, self.columns = self.rows + taller, self.columns + wider

    def move(self, source: list[int], target: list[int]) -> None:
        """Make rows `source` the rows `target`."""
        if source:
            for x in (self.keys, self.values):
                x[:, target, :, : self.used] = x[:, source, :, : self.used]


class _DecodeCache(Cache):
    """Hands `KVCache` to a transformers model for one decode step: each row writes at its own position."""

    def __init__(self, kv: KVCache, positions: torch.Tensor, length: int):
        super().__init__(layers=[])
        self.kv, self.positions, self.length = kv, positions, length
        self.rows = torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        keys, values, rows = self.kv.keys[layer_idx], self.kv.values[layer_idx], len(self.positions)
        keys[self.rows, :, self.positions] = key_states[:, :, 0]
        values[self.rows, :, self.positions] = value_states[:, :, 0]
        return keys[:rows, :, : self.length], values[:rows, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - 1


class HFModel:
    """The network behind the embedded engine.

    network: the transformers module. weights: its tensors under their checkpoint names, as views: writing
    into one changes the network. context: the most tokens of a sequence. route_shape: (MoE layers, top-k).
    """

    def __init__(self, network: Any):
        self.network = network.eval().requires_grad_(False)
        self.weights = checkpoint_views(network)
        config = network.config.get_text_config()
        self.context: int = config.max_position_embeddings
        self.vocabulary: int = network.get_output_embeddings().weight.shape[0]
        experts = [m for m in network.modules() if is_experts(m)]
        self.experts = max((m.num_experts for m in experts), default=0)
        self.route_shape = (len(experts), getattr(config, "num_experts_per_tok", 0) if experts else 0)
        self.route_dtype = np.min_scalar_type(max(self.experts - 1, 0))
        self._seen: list[torch.Tensor] | None = None
        for module in experts:
            module.register_forward_pre_hook(self._see, with_kwargs=True)

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, routes: bool) -> Prefilled:
        """Run whole sequences: ids int64 [rows, n], padded at the right to n; lengths int64 [rows].

        A causal mask is all it takes: no token looks to its right, where the padding is.
        """
        cache = DynamicCache()
        kept, at = torch.unique(lengths - 1, return_inverse=True)
        with self._routes(routes) as seen:
            out = self.network(ids, past_key_values=cache, use_cache=True, logits_to_keep=kept)
        layers: list[Any] = list(cache.layers)
        return Prefilled(
            logits=out.logits[torch.arange(len(ids), device=ids.device), at].float(),
            keys=torch.stack([layer.keys for layer in layers]),
            values=torch.stack([layer.values for layer in layers]),
            routes=torch.stack(seen, 1).unflatten(0, ids.shape) if seen else None,
        )

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, kv: KVCache, length: int, routes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one more token for each of the first rows of `kv`: ids and positions int64 [rows].

        length: the greatest position + 1. Returns logits float32 [rows, vocabulary] and routes int64
        [rows, moe_layers, top_k] if asked.
        """
        mask = torch.arange(length, device=ids.device) <= positions[:, None]
        with self._routes(routes) as seen:
            logits = self.network(
                input_ids=ids[:, None],
                position_ids=positions[:, None],
                attention_mask=mask[:, None, None],
                past_key_values=_DecodeCache(kv, positions, length),
                use_cache=True,
            ).logits
        return logits[:, 0].float(), torch.stack(seen, 1) if seen else None

    @contextmanager
    def _routes(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        seen: list[torch.Tensor] = []
        self._seen = seen if wanted else None
        yield seen
        self._seen = None

    def _see(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._seen is not None:
            self._seen.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])


def is_experts(module: torch.nn.Module) -> bool:
    """Tell whether this module is a layer's experts: one module in transformers, called with (hidden, top_k_index,
    top_k_weights)."""
    return isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter) and hasattr(
        module, "num_experts"
    )


def checkpoint_views(network: Any) -> dict[str, torch.Tensor]:
    """Return the network's tensors by checkpoint name, as views of its memory.

    transformers fuses the experts of a layer (`experts.gate_up_proj` [experts, 2 * intermediate, hidden],
    `experts.down_proj` [experts, hidden, intermediate]); checkpoints name each one's projections, by names that
    transformers knows. Tied tensors appear once. Every view is compared with what transformers itself would save.
    """
    views: dict[str, torch.Tensor] = {}
    # Both iterators name a tied tensor once; the state dict holds what is saved, under every name.
    once = {name for name, _ in (*network.named_parameters(), *network.named_buffers())}
    for name, tensor in network.state_dict().items():
        if name not in once:
            continue
        expected = revert_weight_conversion(network, {name: tensor})
        parts = [tensor]
        if len(expected) > 1 and tensor.ndim == 3:  # all experts of the first projection, of the second, ...
            split = [expert.chunk(len(expected) // len(tensor)) for expert in tensor]
            parts = [part for projection in zip(*split, strict=True) for part in projection]
        views |= zip(expected, parts, strict=False)
        if len(parts) != len(expected) or not all(map(torch.equal, parts, expected.values())):
            raise UserError(
                f"the embedded engine doesn't know how {network.config.model_type} checkpoints hold {name} "
                f"({', '.join(list(expected)[:3])}, ...). Use the sglang engine."
            )
    return views
