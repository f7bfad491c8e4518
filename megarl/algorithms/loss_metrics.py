"""What the policy loss measures on its way, with the loss's own token weights (names in `metric_table.py`).

Token metrics are weighted by w_t. Response metrics count each response once: where a response is split over
ranks, each rank counts the share of it that it holds. Masked tokens have weight 0 and log-ratio 0, and count
nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms import metrics as m
from megarl.algorithms.corrections import Correction
from megarl.algorithms.kl import kl_clamped
from megarl.algorithms.metrics import Metrics
from megarl.algorithms.ratios import MAX_LOG_RATIO, bounded
from megarl.algorithms.responses import Responses
from megarl.algorithms.surrogates import Surrogate


@torch.no_grad()
def batch_metrics(advantages: Tensor, weights: Tensor, responses: Responses) -> Metrics:
    """advantages, weights: [T]."""
    return {
        "train/active_tokens": m.sum_of(responses.local),
        "train/active_responses": m.sum_of(responses.share),
        "train/advantage": m.moments_of(advantages, weights),
        "train/advantage_max": m.largest_of(advantages, responses.mask),
        "train/advantage_min": m.smallest_of(advantages, responses.mask),
    }


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor, mean_log_ratio: Tensor, weights: Tensor, responses: Responses
) -> Metrics:
    """log_ratio: [T], logp - old. mean_log_ratio: float64 [R]."""
    share, mask = responses.share, responses.mask
    log_ratio, sequence_ratio = log_ratio.detach(), bounded(mean_log_ratio).exp()
    out = {
        "train/ratio": m.quantiles_of(log_ratio, weights),
        "train/ratio_clamped": m.sum_of(log_ratio.abs() > MAX_LOG_RATIO),
        "train/seq_ratio": m.quantiles_of(mean_log_ratio, share),
        "train/seq_ratio_mean": m.mean_of(sequence_ratio, share),
        "train/seq_ratio_max": m.largest_of(sequence_ratio, share > 0),
        "train/seq_ratio_min": m.smallest_of(sequence_ratio, share > 0),
        "train/seq_ratio_clamped": m.sum_of(share * (mean_log_ratio.abs() > MAX_LOG_RATIO)),
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
def clip_metrics(surrogate: Surrogate, advantages: Tensor, weights: Tensor, responses: Responses) -> Metrics:
    """Shares of tokens, and of responses with such a token, that were held back; nothing for a soft
    surrogate."""
    if surrogate.low is None or surrogate.high is None:
        return {}
    mask = responses.mask
    flags = {"_low": surrogate.low & mask, "_high": surrogate.high & mask}
    if surrogate.dual is not None:
        flags["_dual"] = surrogate.dual
    clipped = torch.stack(list(flags.values())).any(dim=0)
    signs = {"": mask, "_positive": advantages > 0, "_negative": advantages < 0}
    pairs = {suffix: (flag, mask) for suffix, flag in flags.items()}
    pairs |= {suffix: (clipped & among, among) for suffix, among in signs.items()}

    out: Metrics = {}
    for suffix, (flag, among) in pairs.items():
        out[f"train/clip_fraction{suffix}"] = m.mean_of(flag, weights * among)
        has_one = (responses.sum(flag) > 0, responses.sum(among) > 0)
        out[f"train/seq_clip_fraction{suffix}"] = m.mean_of(has_one[0], responses.share * has_one[1])
    return out


@torch.no_grad()
def weight_metrics(
    ratio: Tensor, correction: Correction | None, off_policy: Tensor | None, weights: Tensor
) -> Metrics:
    """Importance weights as a whole: ratio [T] times correction; off_policy: bool [T]."""
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
def kl_metrics(kind: str, kl: Tensor, logprobs: Tensor, reference: Tensor, weights: Tensor) -> Metrics:
    """kl: [T], the estimate; logprobs, reference: [T]."""
    return {
        "train/kl": m.mean_of(kl.detach(), weights),
        "train/kl_clamped": m.sum_of(kl_clamped(kind, logprobs, reference)),
    }
