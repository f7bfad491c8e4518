"""Packing sequences into micro-batches under a token budget, and per-response values by input position.

No position is spent on padding: a micro-batch holds whole sequences, and attention is kept inside each of
them by `cu_seqlens`. How sequences are distributed over micro-batches changes nothing but rounding, because
a token's weight in the loss is decided on the global batch before packing (docs/data.md, "Packing").
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.records import MicroBatch, Sample


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence to train on, whatever made it (a sampled response, a demonstration, one side of a pair).

    token_ids: int64 [tokens].
    loss_mask: bool [tokens]; True = the model is trained to predict this token, which the first one never is.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int64))
        object.__setattr__(self, "loss_mask", np.asarray(self.loss_mask, dtype=np.bool_))
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError("a token sequence must be a non-empty vector")
        if self.loss_mask.shape != self.token_ids.shape:
            raise ValueError(
                f"token sequence: loss_mask has shape {self.loss_mask.shape}, tokens {self.token_ids.shape}"
            )

    @classmethod
    def from_sample(cls, sample: Sample) -> TokenSequence:
        """Prompt and response of a sample; the prompt is masked, the response has the sample's own mask."""
        prompt = sample.prompt.token_ids
        return cls(
            token_ids=np.concatenate([prompt, sample.response_ids]),
            loss_mask=np.concatenate([np.zeros(len(prompt), dtype=np.bool_), sample.loss_mask]),
        )

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Distribute sequences over micro-batches: best-fit decreasing, deterministic, O(n log n) comparisons.

    lengths: tokens of each sequence. token_budget: tokens of a micro-batch; a longer sequence gets one of its own.
    Returns lists of indices into `lengths`, ascending inside a list, every index exactly once. The fullest
    micro-batch comes first (ties: the one that holds the earliest sequence), so that replicas which walk
    their lists in step meet micro-batches of like size, and memory is at its peak on the first one.
    """
    if token_budget < 1:
        raise ValueError(f"the token budget of a micro-batch must be positive, not {token_budget}")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], -1))
        if place < len(room):
            left, chosen = room.pop(place)
        else:
            left, chosen = token_budget, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return _ordered(bins, lengths)


def split_to_count(packed: Sequence[Sequence[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split micro-batches until there are `count`, the heaviest first, into halves of about equal tokens.

    Stops early when each holds one sequence. Raises ValueError if there are more than `count` to begin
    with: the count that replicas agree on is the largest that any of them needs.
    """
    if count < len(packed):
        raise ValueError(
            f"{len(packed)} micro-batches are needed, but a count of {count} was asked for: "
            "use the largest count over all replicas, or raise the token budget"
        )
    bins = [list(b) for b in packed]
    while len(bins) < count:
        heaviest = max(
            (i for i in range(len(bins)) if len(bins[i]) > 1),
            key=lambda i: (sum(lengths[j] for j in bins[i]), -bins[i][0]),
            default=None,
        )
        if heaviest is None:
            break
        bins += _halves(bins.pop(heaviest), lengths)
    return _ordered(bins, lengths)


def _halves(indices: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return two non-empty parts of about equal tokens: longest first, each to the lighter part."""
    parts: tuple[list[int], list[int]] = ([], [])
    weights = [0, 0]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        lighter = min((0, 1), key=lambda side: (weights[side], len(parts[side]), side))
        parts[lighter].append(index)
        weights[lighter] += lengths[index]
    return [list(part) for part in parts]


def _ordered(bins: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    inside = [sorted(b) for b in bins]
    return sorted(inside, key=lambda b: (-sum(lengths[i] for i in b), b[0]))


def micro_batch_count(sequences: Sequence[Sample | TokenSequence], token_budget: int) -> int:
    """Return how many micro-batches these sequences need. Replicas agree on the largest and pass it as `count`."""
    return len(pack([s.tokens for s in sequences], token_budget))


def make_micro_batches(
    sequences: Sequence[Sample | TokenSequence], token_budget: int, count: int | None = None
) -> tuple[MicroBatch, ...]:
    """Pack samples or token sequences; every one lands in exactly one micro-batch, none is cut or dropped.

    sequences: `rows` of the micro-batches index this list.
    token_budget: tokens of a micro-batch (prompt and response); a longer sequence gets a micro-batch of its own.
    count: make exactly this many, so that all replicas make equally many calls of the model: micro-batches are
        split further, and once each holds one sequence, fillers are added at the end. Raises ValueError if more
        are needed.
    """
    lengths = [s.tokens for s in sequences]
    packed = pack(lengths, token_budget)
    if count is not None:
        packed = split_to_count(packed, lengths, count)
    made = [_micro_batch(sequences, rows) for rows in packed]
    missing = 0 if count is None else count - len(made)
    return (*made, *(_filler() for _ in range(missing)))


def _micro_batch(sequences: Sequence[Sample | TokenSequence], rows: Sequence[int]) -> MicroBatch:
    chosen = [
        s if isinstance(s, TokenSequence) else TokenSequence.from_sample(s)
        for s in (sequences[i] for i in rows)
    ]
    lengths = [s.tokens for s in chosen]
    nothing = np.zeros(1, dtype=np.int64)
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in chosen])),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
        labels=torch.from_numpy(
            np.concatenate([part for s in chosen for part in (s.token_ids[1:], nothing)])
        ),
        mask=torch.from_numpy(
            np.concatenate([part for s in chosen for part in (s.loss_mask[1:], nothing.astype(np.bool_))])
        ),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        rows=torch.tensor(list(rows), dtype=torch.int64),
    )


def _filler() -> MicroBatch:
    """Return a micro-batch of no sequences: one masked token 0, which attention sees as a sequence of length 1."""
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        labels=torch.zeros(1, dtype=torch.int64),
        mask=torch.zeros(1, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        rows=torch.empty(0, dtype=torch.int64),
    )


def response_positions(micro_batch: MicroBatch, samples: Sequence[Sample]) -> torch.Tensor:
    """Return input positions that predict response tokens: int64 [response tokens of the micro-batch], in row order.

    Response token `j` after `p` prompt tokens is predicted at position `p + j - 1` of its sequence.
    """
    starts = micro_batch.cu_seqlens.tolist()
    spans = [
        torch.arange(starts[k] + len(samples[row].prompt.token_ids) - 1, starts[k + 1] - 1)
        for k, row in enumerate(micro_batch.rows.tolist())
    ]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def scatter_response(
    micro_batch: MicroBatch, samples: Sequence[Sample], values: Sequence[np.ndarray | torch.Tensor]
) -> torch.Tensor:
    """Return per-response vectors as one vector by input position.

    samples: what the micro-batch's rows index. values: one vector [response_tokens] for each sample, in
    their order (for example each sample's engine log-probabilities). Returns [tokens] of the values' dtype
    (float32 for a filler), 0 where no response token is predicted. Raises ValueError naming the sample whose
    vector has a wrong length.
    """
    chosen = []
    for row in micro_batch.rows.tolist():
        value = torch.as_tensor(values[row])
        if value.shape != (len(samples[row].response_ids),):
            raise ValueError(
                f"sample {samples[row].sample_id!r}: a vector of shape {tuple(value.shape)} was given for "
                f"{len(samples[row].response_ids)} response tokens"
            )
        chosen.append(value)
    flat = torch.cat(chosen) if chosen else torch.empty(0)
    out = torch.zeros(micro_batch.tokens, dtype=flat.dtype, device=flat.device)
    return out.index_copy(0, response_positions(micro_batch, samples).to(flat.device), flat)
