"""The slot `correction`: what is done where the engine that sampled and the trainer disagree.

The weight is w = exp(trainer's old log-probability - engine's), never its inverse, and has no gradient. It
multiplies the policy term; KL and entropy are not corrected.
Sources: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; MIS
and the sequence forms, Liu et al. 2025, "When speed kills stability"; IcePop, Ring-1T 2510.18855; the
off-policy mask, DeepSeek-V3.2 2512.02556.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.parts import Setting, absent, part
from megarl.algorithms.ratios import bounded
from megarl.algorithms.responses import Responses


class Mismatch(NamedTuple):
    """What a correction sees. log_weight: float32 [tokens], old (trainer) - engine, 0 where masked."""

    log_weight: Tensor
    responses: Responses

    def of_response(self) -> Tensor:
        """float32 [tokens]: the log-weight of the whole response, a sum over its active tokens."""
        return self.responses.spread(self.responses.sum(self.log_weight))

    def of_response_mean(self) -> Tensor:
        """float32 [tokens]: the mean log-weight over the response's active tokens."""
        return self.responses.spread(self.responses.mean(self.log_weight))


class Correction(NamedTuple):
    """weight: float32 [tokens], to multiply the policy term. truncated (capped), masked (left out): bool [tokens]."""

    weight: Tensor
    truncated: Tensor
    masked: Tensor


Low = Annotated[float, Setting("smallest trainer/engine weight that is kept", at_least=0.0)]
High = Annotated[float, Setting("largest trainer/engine weight that is kept", above=0.0)]
Cap = Annotated[float, Setting("what a larger trainer/engine weight is capped to", above=0.0)]


NONE = absent("correction", "old log-probabilities are taken as the sampler's")


@part(
    "correction",
    formula="c_t = min(exp(old_t - engine_t), correction_high)",
    meaning="truncated importance sampling, token by token",
)
def tis(mismatch: Mismatch, *, correction_high: Cap = 2.0) -> Correction:
    return _truncated(mismatch.log_weight, correction_high)


@part(
    "correction",
    formula="c_t = exp(old_t - engine_t) inside [correction_low, correction_high], else 0",
    meaning="masked importance sampling: tokens that disagree are left out",
)
def mis(mismatch: Mismatch, *, correction_low: Low = 0.5, correction_high: High = 2.0) -> Correction:
    return _kept_inside(mismatch.log_weight, correction_low, correction_high)


@part(
    "correction",
    formula="c_t = exp(old_t - engine_t) inside [correction_low, correction_high], else 0",
    meaning="mis with IcePop's wider bounds, made for MoE",
)
def icepop(mismatch: Mismatch, *, correction_low: Low = 0.5, correction_high: High = 5.0) -> Correction:
    return _kept_inside(mismatch.log_weight, correction_low, correction_high)


@part(
    "correction",
    formula="c_i = min(exp(sum over active t of (old_t - engine_t)), correction_high)",
    meaning="tis on the probability of the whole response",
)
def sequence_tis(mismatch: Mismatch, *, correction_high: Cap = 2.0) -> Correction:
    return _truncated(mismatch.of_response(), correction_high)


@part(
    "correction",
    formula="c_i = exp(sum over active t of (old_t - engine_t)) inside [correction_low, correction_high], else 0",
    meaning="mis on the probability of the whole response",
)
def sequence_mis(mismatch: Mismatch, *, correction_low: Low = 0.5, correction_high: High = 2.0) -> Correction:
    return _kept_inside(mismatch.of_response(), correction_low, correction_high)


@part(
    "correction",
    formula="c_i = exp(mean over active t of (old_t - engine_t)) inside [correction_low, correction_high], else 0",
    meaning="mis on the mean ratio: bounds that do not depend on the length",
)
def geometric_mis(
    mismatch: Mismatch, *, correction_low: Low = 0.99, correction_high: High = 1.01
) -> Correction:
    return _kept_inside(mismatch.of_response_mean(), correction_low, correction_high)


def _truncated(log_weight: Tensor, cap: float) -> Correction:
    weight = bounded(log_weight).exp()
    truncated = weight > cap
    return Correction(weight.clamp(max=cap), truncated, torch.zeros_like(truncated))


def _kept_inside(log_weight: Tensor, low: float, high: float) -> Correction:
    weight = bounded(log_weight).exp()
    masked = (weight < low) | (weight > high)
    return Correction(torch.where(masked, 0.0, weight), torch.zeros_like(masked), masked)


def off_policy_mask(delta: float, advantages: Tensor, mean_log_ratio: Tensor, responses: Responses) -> Tensor:
    """Return the tokens with A < 0 of responses that the policy has moved away from, mean(old - logp) > delta.

    bool [tokens]. delta: nats. advantages: float32 [tokens]. mean_log_ratio: float64 [responses], of logp - old.
    """
    drifted = (-mean_log_ratio > delta).double()
    return (advantages < 0) & (responses.spread(drifted) > 0)
