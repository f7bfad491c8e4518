"""What the policy loss measures on its way, with the loss's own token weights, and how far engine and trainer
are apart (names in `megarl/monitor/policy_metrics.py`).

Token metrics are weighted by w_t. Response metrics count each response once. Masked tokens have weight 0 and
log-ratio 0, and count nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms import metrics as m
from megarl.algorithms.corrections import Correction
from megarl.algorithms.kl import KLEstimate
from megarl.algorithms.metrics import Metrics
from megarl.algorithms.ratios import MAX_LOG_RATIO, bounded
from megarl.algorithms.responses import Responses
from megarl.algorithms.surrogates import TokenLosses


@torch.no_grad()
def batch_metrics(advantages: Tensor, weights: Tensor, responses: Responses) -> Metrics:
    """advantages, weights: [tokens]."""
    return {
        "train/active_tokens": m.sum_of(responses.active),
        "train/active_responses": m.sum_of(responses.present),
        "train/advantage": m.moments_of(advantages, weights),
        "train/advantage_max": m.largest_of(advantages, responses.mask),
        "train/advantage_min": m.smallest_of(advantages, responses.mask),
    }


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor, mean_log_ratio: Tensor, weights: Tensor, responses: Responses
) -> Metrics:
    """log_ratio: [tokens], logp - old. mean_log_ratio: float64 [responses]."""
    present, mask = responses.present, responses.mask
    log_ratio, sequence_ratio = log_ratio.detach(), bounded(mean_log_ratio).exp()
    out = {
        "train/ratio": m.quantiles_of(log_ratio, weights),
        "train/ratio_clamped": m.sum_of(log_ratio.abs() > MAX_LOG_RATIO),
        "train/seq_ratio": m.quantiles_of(mean_log_ratio, present),
        "train/seq_ratio_mean": m.mean_of(sequence_ratio, present),
        "train/seq_ratio_max": m.largest_of(sequence_ratio, present > 0),
        "train/seq_ratio_min": m.smallest_of(sequence_ratio, present > 0),
        "train/seq_ratio_clamped": m.sum_of(present * (mean_log_ratio.abs() > MAX_LOG_RATIO)),
    }
    log_ratio = bounded(log_ratio)
    out["train/kl_old_k1"] = m.mean_of(-log_ratio, weights)
    out["train/kl_old_k3"] = m.mean_of(log_ratio.expm1() - log_ratio, weights)
    ratio = log_ratio.exp()
    out["train/ratio_mean"] = m.mean_of(ratio, weights)
    out["train/ratio_max"] = m.largest_of(ratio, mask)
    out["train/ratio_min"] = m.smallest_of(ratio, mask)
    return out


@torch.no_grad()
def clip_metrics(losses: TokenLosses, advantages: Tensor, weights: Tensor, responses: Responses) -> Metrics:
    """Shares of tokens held back, and of responses with such a token; nothing for a soft surrogate."""
    if losses.low is None or losses.high is None:
        return {}
    mask = responses.mask
    flags = {"_low": losses.low & mask, "_high": losses.high & mask}
    if losses.dual is not None:
        flags["_dual"] = losses.dual
    clipped = torch.stack(list(flags.values())).any(dim=0)
    signs = {"": mask, "_positive": advantages > 0, "_negative": advantages < 0}
    pairs = {suffix: (flag, mask) for suffix, flag in flags.items()}
    pairs |= {suffix: (clipped & among, among) for suffix, among in signs.items()}

    out: Metrics = {}
    for suffix, (flag, among) in pairs.items():
        out[f"train/clip_fraction{suffix}"] = m.mean_of(flag, weights * among)
        has_one = (responses.sum(flag) > 0, responses.sum(among) > 0)
        out[f"train/seq_clip_fraction{suffix}"] = m.mean_of(has_one[0], responses.present * has_one[1])
    return out


@torch.no_grad()
def weight_metrics(
    ratio: Tensor, correction: Correction | None, off_policy: Tensor | None, weights: Tensor
) -> Metrics:
    """Importance weights as a whole: ratio [tokens] times correction; off_policy: bool [tokens]."""
    importance = ratio.detach()
    out: Metrics = {}
    if correction is not None:
        importance = importance * correction.weight
        out["train/correction_mean"] = m.mean_of(correction.weight, weights)
        out["train/correction_truncated"] = m.mean_of(correction.truncated, weights)
        out["train/correction_masked"] = m.mean_of(correction.masked, weights)
    if off_policy is not None:
        out["train/off_policy_masked"] = m.mean_of(off_policy, weights)
    out["train/ess"] = m.effective_size_of(importance, weights)
    return out


@torch.no_grad()
def kl_metrics(kl: KLEstimate, weights: Tensor) -> Metrics:
    out = {"train/kl": m.mean_of(kl.value.detach(), weights)}
    if kl.clamped is not None:
        out["train/kl_clamped"] = m.sum_of(kl.clamped)
    return out


@torch.no_grad()
def mismatch_metrics(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Metrics:
    """Return how far the engine that sampled and the trainer are apart, for the same weights and tokens.

    Differences per token and per response; every active token, and every response, counts the same.

    trainer_logprobs, engine_logprobs: [tokens], of the sampled tokens, at the sampling temperature. mask: bool
    [tokens]. cu_seqlens: [sequences + 1]. KL estimates are of KL(engine || trainer), since the engine sampled: with
    x = log trainer - log engine, k1 = -x and k3 = exp(x) - 1 - x.
    """
    responses = Responses.of(mask, cu_seqlens)
    difference = responses.clean(trainer_logprobs, "trainer_logprobs") - responses.clean(
        engine_logprobs, "engine_logprobs"
    )
    mean_difference = responses.mean(difference)
    active, present, x = mask.float(), responses.present, bounded(difference)
    return {
        "mismatch/abs_diff_mean": m.mean_of(difference.abs(), active),
        "mismatch/abs_diff_max": m.largest_of(difference.abs(), mask),
        "mismatch/k1": m.mean_of(-difference, active),
        "mismatch/k3": m.mean_of(x.expm1() - x, active),
        "mismatch/ratio_outside": m.mean_of((x.exp() < 0.5) | (x.exp() > 2.0), active),
        "mismatch/ratio": m.quantiles_of(x, active),
        "mismatch/seq_ratio": m.quantiles_of(mean_difference, present),
        "mismatch/seq_ratio_max": m.largest_of(bounded(mean_difference).exp(), present > 0),
        "mismatch/seq_ratio_min": m.smallest_of(bounded(mean_difference).exp(), present > 0),
        "mismatch/tokens": m.sum_of(active),
    }
