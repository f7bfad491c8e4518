"""Token weights: how much each token counts, decided once on the global batch.

The policy loss is sum_t w_t * l_t. A weight depends only on counts, so the sum over any split of the batch
(micro-batches, replicas, context-parallel chunks) is the whole batch's loss, and gradients are summed, never
divided again. "Global batch" is what one optimizer step learns from.

How a trainer makes them, once per optimizer step:

    totals = local_totals(lengths=active tokens of this replica's responses, group_ids=...)
    dist.all_reduce(totals.counts, group=data_parallel)        # three numbers, summed in place
    for each micro-batch:
        weights = token_weights(mode, mask=..., cu_seqlens=..., group_ids=group_ids[rows],
        totals=totals.select(rows))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.responses import Responses
from megarl.errors import UserError, did_you_mean


class Totals(NamedTuple):
    """The counts that token weights are made of.

    counts: int64 [3], of the global batch: active tokens, responses with an active token, groups with one.
        Summed over replicas in place; a group lives on one replica, so nothing is counted twice.
    response_tokens: int64 [R], active tokens of each whole response, also where only a chunk of it is here.
    group_tokens: int64 [R], active tokens of each response's whole group in this optimizer step.
    """

    counts: Tensor
    response_tokens: Tensor
    group_tokens: Tensor

    def select(self, rows: Tensor) -> Totals:
        """The same totals for some of the responses (a micro-batch's). rows: int64 [responses]."""
        return Totals(self.counts, self.response_tokens[rows], self.group_tokens[rows])


def active_tokens(*, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 [R]: active tokens of each response in this chunk; summed over context-parallel ranks, of the
    whole."""
    return Responses.of(mask, cu_seqlens).local.long()


def local_totals(*, lengths: Tensor, group_ids: Tensor) -> Totals:
    """Totals of the responses that this replica brings to one optimizer step, ready to be summed over
    replicas.

    lengths: int [R], active tokens of each whole response. group_ids: int [R], any numbers.
    A response without active tokens counts neither as a response nor towards its group. Raises ValueError for two
    shapes.
    """
    if group_ids.shape != lengths.shape:
        raise ValueError(f"group_ids has shape {list(group_ids.shape)}, lengths {list(lengths.shape)}")
    lengths = lengths.long()
    _, group = torch.unique(group_ids, return_inverse=True)
    per_group = torch.zeros(len(lengths), dtype=torch.int64, device=lengths.device).index_add(
        0, group, lengths
    )
    counts = torch.stack([lengths.sum(), (lengths > 0).sum(), (per_group > 0).sum()])
    return Totals(counts, lengths, per_group[group])


def token_weights(
    mode: str,
    *,
    mask: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor,
    max_length: int | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """float32 [T]: the weight of each token, 0 where masked.

    mode: token_mean | group_token_mean | sequence_mean | constant (see `parts.WEIGHTS`). mask: bool [T].
    cu_seqlens: [R + 1]. group_ids: int [R]. max_length: the generation budget in tokens, for `constant`.
    totals: the global counts where the batch here is a part of it; None = the batch here is the whole.
    All weights are 0 where no token is active. Raises UserError for an unknown mode or a missing max_length.
    """
    if mode not in DENOMINATORS:
        raise UserError(
            f"unknown weights {mode!r}.{did_you_mean(mode, DENOMINATORS)} Known: {', '.join(DENOMINATORS)}."
        )
    if mode == "constant" and (max_length is None or max_length < 1):
        raise UserError(f"weights: constant divides by the generation budget; max_length is {max_length!r}")
    responses = Responses.of(mask, cu_seqlens)
    if totals is None:
        totals = local_totals(lengths=responses.local, group_ids=group_ids)
    denominator = DENOMINATORS[mode](totals, max_length or 0).double()
    per_response = torch.where(denominator > 0, 1.0 / denominator, 0.0)
    return responses.clean(responses.spread(per_response.expand(len(totals.response_tokens))), "weights")


DENOMINATORS: Mapping[str, Callable[[Totals, int], Tensor]] = {
    "token_mean": lambda n, _: n.counts[0],
    "group_token_mean": lambda n, _: n.counts[2] * n.group_tokens,
    "sequence_mean": lambda n, _: n.counts[1] * n.response_tokens,
    "constant": lambda n, budget: n.counts[1] * budget,
}
