"""The policy loss of any recipe: sum_t w_t (c_t l_t + kl_coef kl_t - entropy_coef H_t).

w_t are token weights (`weights.py`), c_t the mismatch correction, l_t the surrogate. The value is this
batch's part of the global loss: it is summed over micro-batches, data and context parallelism, and so are the
gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import loss_metrics
from megarl.algorithms.corrections import correct_mismatch, off_policy_mask
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.metrics import Metrics, loss_of, mean_of
from megarl.algorithms.ratios import RATIOS
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses, SumReduce
from megarl.algorithms.surrogates import SURROGATES, Tokens


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
    reduce_sequence_sum: SumReduce | None = None,
) -> LossOutput:
    """The recipe's loss on a packed batch, with its metrics.

    logprobs: [T], of the sampled tokens under the current policy, with gradient. old_logprobs: [T]; with
    `old_logprobs: current` pass logprobs.detach(). advantages: [R], or [T] where they differ from token to
    token or come from `token_advantages`. mask: bool [T]; masked positions contribute exactly nothing,
    whatever they hold. cu_seqlens: [R + 1]. weights: [T], from `token_weights`. engine_logprobs: [T], needed
    by a correction. ref_logprobs: [T], needed by a KL in the loss, otherwise only measured. entropy: [T],
    needed (with gradient) by an entropy bonus, otherwise only measured. reduce_sequence_sum: sums a [R] vector
    over the ranks that share these responses; every such rank then calls it equally often.

    Never synchronises with the host. Memory beside the arguments: at most 18 float32 [T] while it runs, 8
    until the backward pass. Raises ValueError for a missing or misshapen argument.
    """
    responses = Responses.of(mask, cu_seqlens, reduce_sequence_sum)
    logprobs = responses.clean(logprobs, "logprobs")
    weights = responses.clean(weights, "weights").detach()
    advantages = responses.per_token(advantages, "advantages").detach()

    pg_loss, metrics = _policy_term(
        recipe, logprobs, old_logprobs, engine_logprobs, advantages, weights, responses
    )
    metrics |= loss_metrics.batch_metrics(advantages, weights, responses)
    loss = pg_loss
    if recipe.needs_reference and (recipe.kl_in == "loss" or ref_logprobs is not None):
        kl, kl_metrics = _kl_term(recipe, logprobs, ref_logprobs, weights, responses)
        metrics |= kl_metrics
        if recipe.kl_in == "loss":
            metrics["train/kl_loss"] = loss_of(recipe.kl_coef * kl)
            loss = loss + recipe.kl_coef * kl
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
    ratio = RATIOS[recipe.ratio](log_ratio, mean_log_ratio, responses)
    surrogate = SURROGATES[recipe.surrogate](
        recipe, Tokens(ratio, log_ratio, logprobs, advantages, responses)
    )

    metrics = loss_metrics.ratio_metrics(log_ratio, mean_log_ratio, weights, responses)
    metrics |= loss_metrics.clip_metrics(surrogate, advantages, weights, responses)

    correction = off_policy = None
    corrected = weights
    if recipe.needs_engine_logprobs:
        engine = _needed(engine_logprobs, "engine_logprobs", f"correction {recipe.correction!r}")
        log_weight = responses.clean(old_logprobs, "old_logprobs") - responses.clean(
            engine, "engine_logprobs"
        )
        correction = correct_mismatch(recipe, log_weight, responses)
        del log_weight
        corrected = corrected * correction.weight
    if recipe.off_policy_delta is not None:
        off_policy = off_policy_mask(recipe, advantages, mean_log_ratio, responses)
        corrected = torch.where(off_policy, 0.0, corrected)

    metrics |= loss_metrics.weight_metrics(ratio, correction, off_policy, weights)
    return _weighted_sum(corrected, surrogate.loss), metrics


def _kl_term(
    recipe: Recipe, logprobs: Tensor, ref_logprobs: Tensor | None, weights: Tensor, responses: Responses
) -> tuple[Tensor, Metrics]:
    """sum_t w_t kl_t."""
    reference = _needed(ref_logprobs, "ref_logprobs", f"kl {recipe.kl!r} in the loss")
    reference = responses.clean(reference, "ref_logprobs").detach()
    kl = kl_estimate(recipe.kl, logprobs, reference)
    return _weighted_sum(weights, kl), loss_metrics.kl_metrics(recipe.kl, kl, logprobs, reference, weights)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """float32 scalar, added up in float64."""
    return (weights * values).sum(dtype=torch.float64).float()


def _needed(tensor: Tensor | None, name: str, by: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"policy_loss: {name} is needed by {by}")
    return tensor
