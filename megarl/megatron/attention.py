"""Attention over packed sequences, and RMSNorm, for the platform without Transformer Engine.

Drop-in modules for megatron-core's layer specs: its local attention refuses packed sequences and its torch norm
wrapper refuses sequence parallelism.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron.sharding import SequenceSharding


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight is marked for sequence parallelism, so that its gradient is summed over
    the tensor-parallel ranks (megatron.core.distributed.finalize_model_grads)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, to be computed as one padded batch.

    queries: int64 [sequences, longest], this rank's tokens; padding repeats the sequence's last one.
    real: bool [sequences, longest]. keys: int64 [sequences, longest key], among all context ranks' tokens.
    mask: bool [sequences, 1, longest, longest key], what each query sees; None = causal.
    """

    queries: Tensor
    real: Tensor
    keys: Tensor
    mask: Tensor | None


def make_buckets(sharding: SequenceSharding, context_rank: int) -> tuple[Bucket, ...]:
    """Group the sequences so that no bucket pads to more than twice a length."""
    bounds = sharding.cu_seqlens.tolist()
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(bounds):
        if end > start:
            by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    buckets = []
    for _, spans in sorted(by_size.items()):
        keys, real_keys = _rows(spans, sharding.source.device)
        if sharding.context == 1:
            buckets.append(Bucket(keys, real_keys, keys, None))
            continue
        # the same spans among this rank's tokens, whose padded positions decide what they see
        share = sharding.context
        here = sharding.local(context_rank)
        queries, real = _rows([(start // share, end // share) for start, end in spans], here.device)
        mask = (keys[:, None, :] <= here[queries][:, :, None]) & real_keys[:, None, :]
        buckets.append(Bucket(queries, real, sharding.gathered[keys], mask[:, None]))
    return tuple(buckets)


def _rows(spans: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions [spans, longest] of each span, and which of them are real; the others repeat its last."""
    starts, ends = torch.tensor(spans, device=device).T
    steps = torch.arange(int((ends - starts).max()), device=device)
    positions = starts[:, None] + steps
    return torch.minimum(positions, ends[:, None] - 1), positions < ends[:, None]


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's packed-sequence parameters, with what every layer of `PackedAttention` shares.

    buckets: the sequences by length. inverse: int64 [tokens], each token's place among the buckets' real tokens.
    context: the context-parallel group whose keys and values are gathered, None for one rank.
    """

    buckets: tuple[Bucket, ...] = ()
    inverse: Tensor | None = None
    context: dist.ProcessGroup | None = None

    @classmethod
    def make(cls, sharding: SequenceSharding, context: dist.ProcessGroup | None = None) -> PackedSequences:
        """context: None for one rank."""
        buckets = make_buckets(sharding, dist.get_rank(context) if context else 0)
        order = torch.cat([bucket.queries[bucket.real] for bucket in buckets])
        return cls(**packed(sharding), buckets=buckets, inverse=order.argsort(), context=context)


def packed(sharding: SequenceSharding) -> dict[str, Any]:
    """What PackedSeqParams says of a sharding: whole, padded sequences, whatever the rank."""
    longest = int(sharding.cu_seqlens.diff().max())
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": sharding.cu_seqlens,
        "cu_seqlens_kv": sharding.cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence (megatron-core's `CoreAttention`).

    query [tokens, heads, head_dim]; key, value [tokens, groups, head_dim] -> [tokens, heads * head_dim]. Under
    context parallelism a rank's queries attend to the gathered keys and values of all ranks.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "megarl always packs"
        if packed_seq_params.context is not None:
            key, value = _gather(key, value, packed_seq_params.context)
        parts = []
        for bucket in packed_seq_params.buckets:
            q = query[bucket.queries].transpose(1, 2)
            k, v = (x[bucket.keys].transpose(1, 2) for x in (key, value))
            mixed = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            ).transpose(1, 2)
            parts.append(mixed[bucket.real])
        return torch.cat(parts)[packed_seq_params.inverse].flatten(1)


def _gather(key: Tensor, value: Tensor, context: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All context ranks' keys and values end to end; backward, each rank gets the sum of its own gradients."""
    both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=context)
    return both.split([key.shape[-1], value.shape[-1]], dim=-1)  # type: ignore[return-value]
