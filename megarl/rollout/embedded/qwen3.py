"""Qwen3 and Qwen3-MoE in few operations, for the CPU.

On a small model most of a decode step is the cost of starting operations, not of arithmetic. This forward
computes what the transformers modules compute, on their own weights, with a third of the operations: one
projection for queries, keys and values; their rotation as one complex product; attention without repeated
heads; experts by grouped matrix products. Equality with transformers is a test (`test_embedded.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from megarl.rollout.embedded.model import HFModel, KVCache, Prefilled

# (layer, queries, keys, values: each [tokens, its heads, head_dim]) -> [tokens, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class Layer:
    """One layer's weights, all of them views of the network's own, transposed for `x @ w`.

    qk_norm: [2, head_dim]. gate_up, down: [experts, in, out] in a MoE layer (router: [hidden, experts]),
    [in, out] in a dense one.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    router: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, module: Any) -> Layer:
        """Lay weights that are used together end to end and view the rest."""
        attention, mlp = module.self_attn, module.mlp
        moe = hasattr(mlp, "experts")
        return cls(
            attention_norm=module.input_layernorm.weight,
            qkv=lay_in_one(attention.q_proj, attention.k_proj, attention.v_proj).t(),
            qk_norm=lay_in_one(attention.q_norm, attention.k_norm).view(2, -1),
            out=attention.o_proj.weight.t(),
            mlp_norm=module.post_attention_layernorm.weight,
            router=mlp.gate.weight.t() if moe else None,
            gate_up=mlp.experts.gate_up_proj.mT if moe else lay_in_one(mlp.gate_proj, mlp.up_proj).t(),
            down=mlp.experts.down_proj.mT if moe else mlp.down_proj.weight.t(),
        )


class Qwen3(HFModel):
    """An `HFModel` with its own `prefill` and `decode`."""

    @staticmethod
    def fits(network: Any) -> bool:
        """Tell whether the forward below knows this network in each detail."""
        config = network.config
        return (
            type(network) in (Qwen3ForCausalLM, Qwen3MoeForCausalLM)
            and network.device.type == "cpu"
            and network.dtype == torch.float32
            and hasattr(F, "grouped_mm")
            and config.hidden_act == "silu"
            and not config.attention_bias
            and config.rope_parameters["rope_type"] == "default"
        )

    def __init__(self, network: Any):
        self.layers = [Layer.of(module) for module in network.model.layers]
        super().__init__(network)
        config = network.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = network.model.layers[0].self_attn.head_dim, config.rms_norm_eps
        self.top_k = getattr(config, "num_experts_per_tok", 0)
        self.normalize = getattr(config, "norm_topk_prob", False)
        self.kinds = torch.tensor([0] * self.heads + [1] * self.kv_heads)  # rows of Layer.qk_norm
        self._turns = torch.empty(0)

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, routes: bool) -> Prefilled:
        rows, n = ids.shape
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(_: int, *qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.unflatten(0, (rows, n)).transpose(1, 2) for x in qkv)
            keys.append(k)
            values.append(v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(rows * n, -1)

        hidden, chosen = self._run(ids.flatten(), torch.arange(n).repeat(rows), attend, routes)
        last = hidden.view(rows, n, -1)[torch.arange(rows), lengths - 1]
        return Prefilled(
            logits=self._logits(last),
            keys=torch.stack(keys),
            values=torch.stack(values),
            routes=None if chosen is None else chosen.unflatten(0, (rows, n)),
        )

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, kv: KVCache, length: int, routes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, dim, pairs = len(ids), self.head_dim, len(ids) * self.kv_heads
        per_pair = positions.repeat_interleave(self.kv_heads)  # a pair is a row and one of its kv heads
        at = torch.arange(pairs) * kv.columns + per_pair
        mask = torch.zeros(pairs, 1, length, dtype=kv.keys.dtype)
        mask.masked_fill_(torch.arange(length) > per_pair[:, None, None], float("-inf"))
        # By layer: all columns in one line, to write to, and what the rows look at, to read.
        columns = [x.flatten(1, 3).unbind() for x in (kv.keys, kv.values)]
        seen = [x.flatten(1, 2)[:, :pairs, :length].unbind() for x in (kv.keys, kv.values)]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            columns[0][layer].index_copy_(0, at, k.reshape(-1, dim))
            columns[1][layer].index_copy_(0, at, v.reshape(-1, dim))
            scores = torch.baddbmm(mask, q.reshape(pairs, -1, dim), seen[0][layer].mT, alpha=dim**-0.5)
            return torch.bmm(scores.softmax(-1), seen[1][layer]).view(rows, -1)

        hidden, chosen = self._run(ids, positions, attend, routes)
        return self._logits(hidden), chosen

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, routes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run ids at positions (int64 [tokens]) to hidden [tokens, hidden_size] and routes [tokens, moe_layers,
        top_k]."""
        tokens, half, rotated = len(ids), self.head_dim // 2, self.heads + self.kv_heads
        turns = self._turn(positions)
        x = F.embedding(ids, self.network.model.embed_tokens.weight)
        chosen: list[torch.Tensor] = []
        for i, layer in enumerate(self.layers):
            qkv = torch.mm(self._norm(x, layer.attention_norm), layer.qkv).view(tokens, -1, self.head_dim)
            qk = F.rms_norm(qkv[:, :rotated], (self.head_dim,), None, self.eps).mul_(
                layer.qk_norm[self.kinds]
            )
            # Halves become real and imaginary parts, interleaved: another order of the same head_dim numbers,
            # in queries and keys alike, and so the same products.
            qk = torch.view_as_real(torch.complex(qk[..., :half], qk[..., half:]).mul_(turns)).flatten(2)
            heads = attend(i, qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:])
            x = torch.addmm(x, heads, layer.out)
            y = self._norm(x, layer.mlp_norm)
            if layer.router is None:
                gate, up = torch.mm(y, layer.gate_up).chunk(2, -1)
                x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
            else:
                chosen.append(self._add_experts(x, y, layer))
        return x, torch.stack(chosen, 1) if routes and chosen else None

    def _add_experts(self, x: torch.Tensor, y: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Add the experts of y to x, tokens sorted by expert; return the experts chosen [tokens, top_k]."""
        assert layer.router is not None
        logits = torch.mm(y, layer.router)
        if self.normalize:  # the same as renormalising the top-k of the softmax
            weights, index = logits.topk(self.top_k, -1)
            weights = weights.softmax(-1, dtype=torch.float32)
        else:
            weights, index = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        expert, order = index.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.experts), right=True, out_int32=True)
        token = order // self.top_k
        gate, up = F.grouped_mm(y[token], layer.gate_up, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate).mul_(up), layer.down, offs=ends)
        x.index_add_(0, token, out.mul_(weights.flatten()[order, None]))
        return index

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(
            self._norm(hidden, self.network.model.norm.weight), self.network.lm_head.weight
        ).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _turn(self, positions: torch.Tensor) -> torch.Tensor:
        """Return rotations as complex numbers of modulus 1, [tokens, 1, head_dim / 2]."""
        longest = int(positions.max()) + 1
        if len(self._turns) < longest:
            every = torch.arange(min(self.context, 2 * longest))
            cos, sin = self.network.model.rotary_emb(torch.empty(0), every[None])
            self._turns = torch.complex(cos, sin)[0, :, None, : self.head_dim // 2]
        return self._turns[positions]


def lay_in_one(*modules: Any) -> torch.Tensor:
    """Lay the modules' weights end to end; their parameters become views of the result."""
    fused = torch.cat([module.weight.detach() for module in modules])
    for module, part in zip(modules, fused.split([len(module.weight) for module in modules]), strict=True):
        module.weight.data = part
    return fused
