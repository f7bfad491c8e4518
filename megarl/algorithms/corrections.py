"""Corrections where the engine that sampled and the trainer disagree about probabilities (formulas in
`parts`).

The weight is w = exp(trainer's old log-probability - engine's), never its inverse, and has no gradient. It
multiplies the policy term; KL and entropy are not corrected.
Sources: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; MIS
and the sequence forms, Liu et al. 2025, "When speed kills stability"; IcePop, Ring-1T 2510.18855; the
off-policy mask, DeepSeek-V3.2 2512.02556.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.ratios import bounded
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses


class Correction(NamedTuple):
    """weight: float32 [T], to multiply the policy term. truncated: bool [T], capped; masked: bool [T], left
    out."""

    weight: Tensor
    truncated: Tensor
    masked: Tensor


Level = Callable[[Tensor, Responses], Tensor]
Rule = Callable[[Recipe, Tensor], Correction]


def _token(log_weight: Tensor, responses: Responses) -> Tensor:
    return log_weight


def _sequence(log_weight: Tensor, responses: Responses) -> Tensor:
    return responses.spread(responses.sum(log_weight))


def _geometric(log_weight: Tensor, responses: Responses) -> Tensor:
    return responses.spread(responses.mean(log_weight))


def _truncate(recipe: Recipe, weight: Tensor) -> Correction:
    assert recipe.correction_high is not None
    truncated = weight > recipe.correction_high
    return Correction(weight.clamp(max=recipe.correction_high), truncated, torch.zeros_like(truncated))


def _keep_inside(recipe: Recipe, weight: Tensor) -> Correction:
    assert recipe.correction_low is not None
    assert recipe.correction_high is not None
    masked = (weight < recipe.correction_low) | (weight > recipe.correction_high)
    return Correction(torch.where(masked, 0.0, weight), torch.zeros_like(masked), masked)


CORRECTIONS: Mapping[str, tuple[Level, Rule]] = {
    "tis": (_token, _truncate),
    "mis": (_token, _keep_inside),
    "icepop": (_token, _keep_inside),
    "sequence_tis": (_sequence, _truncate),
    "sequence_mis": (_sequence, _keep_inside),
    "geometric_mis": (_geometric, _keep_inside),
}


@torch.no_grad()
def correct_mismatch(recipe: Recipe, log_weight: Tensor, responses: Responses) -> Correction:
    """The recipe's correction. log_weight: float32 [T], old (trainer) - engine, 0 at masked positions."""
    level, rule = CORRECTIONS[recipe.correction]
    return rule(recipe, bounded(level(log_weight, responses)).exp())


def off_policy_mask(
    recipe: Recipe, advantages: Tensor, mean_log_ratio: Tensor, responses: Responses
) -> Tensor:
    """bool [T]: tokens with A < 0 of responses that the policy has moved away from, mean(old - logp) > delta.

    advantages: float32 [T]. mean_log_ratio: float64 [R], of logp - old.
    """
    assert recipe.off_policy_delta is not None
    drifted = (-mean_log_ratio > recipe.off_policy_delta).double()
    return (advantages < 0) & (responses.spread(drifted) > 0)
