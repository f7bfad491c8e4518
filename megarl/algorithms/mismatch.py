"""How far the engine that sampled and the trainer are apart, for the same weights and tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms import metrics as m
from megarl.algorithms.ratios import bounded
from megarl.algorithms.responses import Responses, SumReduce


@torch.no_grad()
def mismatch_metrics(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    reduce_sequence_sum: SumReduce | None = None,
) -> m.Metrics:
    """Differences per token and per response; every active token, and every response, counts the same.

    trainer_logprobs, engine_logprobs: [T], of the sampled tokens, at the sampling temperature. mask: bool
    [T]. cu_seqlens: [R + 1]. reduce_sequence_sum: as in `policy_loss`. KL estimates are of KL(engine ||
    trainer), since the engine sampled: with x = log trainer - log engine, k1 = -x and k3 = exp(x) - 1 - x.
    """
    responses = Responses.of(mask, cu_seqlens, reduce_sequence_sum)
    difference = responses.clean(trainer_logprobs, "trainer_logprobs") - responses.clean(
        engine_logprobs, "engine_logprobs"
    )
    mean_difference = responses.mean(difference)
    active, share, x = mask.float(), responses.share, bounded(difference)
    return {
        "mismatch/abs_diff_mean": m.mean_of(difference.abs(), active),
        "mismatch/abs_diff_max": m.largest_of(difference.abs(), mask),
        "mismatch/k1": m.mean_of(-difference, active),
        "mismatch/k3": m.mean_of(x.expm1() - x, active),
        "mismatch/ratio_outside": m.mean_of((x.exp() < 0.5) | (x.exp() > 2.0), active),
        "mismatch/ratio": m.quantiles_of(x, active),
        "mismatch/seq_ratio": m.quantiles_of(mean_difference, share),
        "mismatch/seq_ratio_max": m.largest_of(bounded(mean_difference).exp(), share > 0),
        "mismatch/seq_ratio_min": m.smallest_of(bounded(mean_difference).exp(), share > 0),
        "mismatch/tokens": m.sum_of(active),
    }
