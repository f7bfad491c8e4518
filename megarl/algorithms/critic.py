"""The critic's loss: squared error to the returns, with PPO's value clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms import metrics as m
from megarl.algorithms.loss import LossOutput
from megarl.algorithms.responses import clean


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    weights: Tensor,
    value_clip: float | None = 0.2,
) -> LossOutput:
    """sum_t w_t max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2) / 2.

    values: [T], with gradient. old_values, returns: [T], from the rollout (see `gae`). mask: bool [T]; masked
    positions contribute exactly nothing. weights: [T], from `token_weights`. value_clip: None = not clipped.
    The value is this batch's part of the global loss. Source: PPO's reference implementation
    (openai/baselines, ppo2). Raises ValueError for a misshapen argument.
    """
    values, old = clean(mask, values, "values"), clean(mask, old_values.detach(), "old_values")
    target, weights = clean(mask, returns.detach(), "returns"), clean(mask, weights.detach(), "weights")
    error = (values - target).square()
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        moved = values - old
        clipped_error = (old + moved.clamp(-value_clip, value_clip) - target).square()
        # not clipped, the two errors still differ by rounding
        clipped = ((clipped_error > error) & (moved.abs() > value_clip)).detach()
        error = torch.maximum(error, clipped_error)
    loss = (0.5 * weights * error).sum(dtype=torch.float64).float()

    value = values.detach()
    metrics = {
        "critic/value_loss": m.loss_of(loss),
        "critic/value_clip_fraction": m.mean_of(clipped, weights),
        "critic/value": m.moments_of(value, weights),
        "critic/return": m.moments_of(target, weights),
        "critic/error": m.moments_of(target - value, weights),
    }
    return LossOutput(loss, metrics)
