"""The policy loss of any recipe, sum_t w_t (c_t l_t + kl_coef kl_t - entropy_coef H_t), and the critic's.

w_t are token weights (`weights.py`), c_t the mismatch correction, l_t the surrogate. The value is this
batch's part of the global loss: it is summed over micro-batches and data parallelism, and so are the gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import loss_metrics
from megarl.algorithms.corrections import Mismatch, off_policy_mask
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.metrics import Metrics, loss_of, mean_of, moments_of
from megarl.algorithms.ratios import LogRatios
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses, clean
from megarl.algorithms.surrogates import Tokens


class LossOutput(NamedTuple):
    """loss: float32 scalar, to be summed over the global batch. metrics: see `metrics.py`; no gradient."""

    loss: Tensor
    metrics: Metrics


def policy_loss(
    recipe: Recipe,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    weights: Tensor,
    engine_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossOutput:
    """Return the recipe's loss on a packed batch, with its metrics.

    logprobs: [tokens], of the sampled tokens under the current policy, with gradient. old_logprobs: [tokens];
    with `old_logprobs: current` pass logprobs.detach(). advantages: [tokens]. mask: bool [tokens]; masked
    positions contribute exactly nothing, whatever they hold. cu_seqlens: [sequences + 1], whole sequences.
    weights: [tokens], from `token_weights`. engine_logprobs: [tokens], needed by a correction. ref_logprobs:
    [tokens], needed by a KL in the loss, otherwise only measured. entropy: [tokens], needed (with gradient) by
    an entropy bonus, otherwise only measured.

    Never synchronises with the host. Memory beside the arguments: at most 18 float32 [tokens] while it runs, 8
    until the backward pass. Raises ValueError for a missing or misshapen argument.
    """
    responses = Responses.of(mask, cu_seqlens)
    logprobs = responses.clean(logprobs, "logprobs")
    weights = responses.clean(weights, "weights").detach()
    advantages = responses.clean(advantages, "advantages").detach()

    pg_loss, metrics = _policy_term(
        recipe, logprobs, old_logprobs, engine_logprobs, advantages, weights, responses
    )
    metrics |= loss_metrics.batch_metrics(advantages, weights, responses)
    loss = pg_loss
    if recipe.kl != "none" and (recipe.kl_in == "loss" or ref_logprobs is not None):
        reference = _needed(ref_logprobs, "ref_logprobs", f"kl {recipe.kl!r} in the loss")
        kl = kl_estimate(recipe.use("kl"), logprobs, responses.clean(reference, "ref_logprobs"))
        metrics |= loss_metrics.kl_metrics(kl, weights)
        if recipe.kl_in == "loss":
            kl_loss = recipe.kl_coef * _weighted_sum(weights, kl.value)
            metrics["train/kl_loss"] = loss_of(kl_loss)
            loss = loss + kl_loss
    if recipe.entropy_coef or entropy is not None:
        entropy = responses.clean(_needed(entropy, "entropy", "entropy_coef"), "entropy")
        metrics["train/entropy"] = mean_of(entropy.detach(), weights)
        if recipe.entropy_coef:
            loss = loss - recipe.entropy_coef * _weighted_sum(weights, entropy)
    return LossOutput(loss, metrics | {"train/loss": loss_of(loss), "train/pg_loss": loss_of(pg_loss)})


def _policy_term(
    recipe: Recipe,
    logprobs: Tensor,
    old_logprobs: Tensor,
    engine_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    responses: Responses,
) -> tuple[Tensor, Metrics]:
    """sum_t w_t c_t l_t: ratio, surrogate, correction."""
    log_ratio = logprobs - responses.clean(old_logprobs, "old_logprobs").detach()
    mean_log_ratio = responses.mean(log_ratio.detach())
    ratio = recipe.use("ratio")(LogRatios(log_ratio, mean_log_ratio, responses))
    losses = recipe.use("surrogate")(Tokens(ratio, log_ratio, logprobs, advantages, responses))

    metrics = loss_metrics.ratio_metrics(log_ratio, mean_log_ratio, weights, responses)
    metrics |= loss_metrics.clip_metrics(losses, advantages, weights, responses)

    correction = off_policy = None
    corrected = weights
    if recipe.correction != "none":
        engine = _needed(engine_logprobs, "engine_logprobs", f"correction {recipe.correction!r}")
        log_weight = responses.clean(old_logprobs, "old_logprobs") - responses.clean(
            engine, "engine_logprobs"
        )
        with torch.no_grad():
            correction = recipe.use("correction")(Mismatch(log_weight, responses))
        del log_weight
        corrected = corrected * correction.weight
    if recipe.off_policy_delta is not None:
        off_policy = off_policy_mask(recipe.off_policy_delta, advantages, mean_log_ratio, responses)
        corrected = torch.where(off_policy, 0.0, corrected)

    metrics |= loss_metrics.weight_metrics(ratio, correction, off_policy, weights)
    return _weighted_sum(corrected, losses.loss), metrics


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

    values: [tokens], with gradient. old_values, returns: [tokens], from the rollout (see
    `assign_advantages`). mask: bool [tokens]; masked positions contribute exactly nothing. weights: [tokens],
    from `token_weights`. value_clip: None = not clipped. The value is this batch's part of the global loss.
    Source: PPO's reference implementation (openai/baselines, ppo2). Raises ValueError for a misshapen
    argument.
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
        "critic/value_loss": loss_of(loss),
        "critic/value_clip_fraction": mean_of(clipped, weights),
        "critic/value": moments_of(value, weights),
        "critic/return": moments_of(target, weights),
        "critic/error": moments_of(target - value, weights),
    }
    return LossOutput(loss, metrics)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """float32 scalar, added up in float64."""
    return (weights * values).sum(dtype=torch.float64).float()


def _needed(tensor: Tensor | None, name: str, by: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"policy_loss: {name} is needed by {by}")
    return tensor
