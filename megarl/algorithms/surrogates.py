"""Per-token policy losses, to be minimised (formulas in `parts.SURROGATES`).

Each takes the ratios and advantages of all tokens and returns the loss of each, with the tokens whose update
was held back on the low and on the high side. Masked tokens arrive with log-ratio and advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.ratios import bounded, with_gradient_of
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses


class Tokens(NamedTuple):
    """What a surrogate sees, float32 [T]; ratio, log_ratio and logprobs carry the policy's gradient."""

    ratio: Tensor
    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor
    responses: Responses


class Surrogate(NamedTuple):
    """loss: float32 [T]. low, high: bool [T], held back at the lower, upper bound; None = there are no
    bounds. dual: bool [T], held back by the dual clip; None = there is none."""

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


def clip(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """PPO's clipped objective (1707.06347, Eq. 7), with the dual clip of 1912.09729.

    min(r A, clip(r) A) is r A with r held at the bound that A pushes past.
    """
    lower, upper = _bounds(recipe)
    low, high = _outside(recipe, tokens.ratio, tokens.advantages)
    held = torch.where(low, lower, torch.where(high, upper, tokens.ratio))
    dual = None
    if recipe.dual_clip is not None:
        dual = (tokens.advantages < 0) & (tokens.ratio.detach() > recipe.dual_clip)
        held = torch.where(dual, recipe.dual_clip, held)
    return Surrogate(-(tokens.advantages * held), low, high, dual)


def cispo(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """Clipped, detached importance weight times policy gradient (2506.13585, Eq. 4)."""
    lower, upper = _bounds(recipe)
    ratio = tokens.ratio.detach()
    loss = -(ratio.clamp(lower, upper) * tokens.advantages) * tokens.logprobs
    return Surrogate(loss, ratio < lower, ratio > upper)


def cispo_mask(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """`cispo` without the tokens outside PPO's trust region (2506.13585, Eq. 6 and 7)."""
    lower, upper = _bounds(recipe)
    return _masked(recipe, tokens, tokens.ratio.detach().clamp(lower, upper))


def minirl(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """Importance-weighted REINFORCE inside PPO's trust region (2512.01374). The mismatch factor is a
    correction."""
    return _masked(recipe, tokens, tokens.ratio.detach())


def sapo(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """A sigmoid gate on the ratio (2511.20347): slope 1 at ratio 1, fading on both sides."""
    positive, negative = _given(recipe.tau_positive), _given(recipe.tau_negative)
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0))
    return Surrogate(-(4.0 * tokens.advantages / tau) * gate)


def gmpo(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """Geometric mean of sign-aware clipped ratios (2507.20673), at every token of its response.

    With weights 1 / |y| the tokens' gradients add up to the geometric mean's own: a clipped token has none.
    """
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    upper, lower = _given(recipe.clip_high), -_given(recipe.clip_low)
    high = positive & (tokens.log_ratio.detach() > upper)
    low = negative & (tokens.log_ratio.detach() < lower)
    clipped = torch.where(high, upper, torch.where(low, lower, tokens.log_ratio))
    mean = tokens.responses.spread(bounded(tokens.responses.mean(clipped)))
    return Surrogate(-with_gradient_of(mean, clipped) * tokens.advantages, low, high)


def _masked(recipe: Recipe, tokens: Tokens, weight: Tensor) -> Surrogate:
    low, high = _outside(recipe, tokens.ratio, tokens.advantages)
    kept = torch.where(low | high, 0.0, weight * tokens.advantages)
    return Surrogate(-kept * tokens.logprobs, low, high)


def _outside(recipe: Recipe, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that already moved past the bound their advantage pushes towards: (low, high)."""
    lower, upper = _bounds(recipe)
    return (advantage < 0) & (ratio.detach() < lower), (advantage > 0) & (ratio.detach() > upper)


def _bounds(recipe: Recipe) -> tuple[float, float]:
    return 1.0 - _given(recipe.clip_low), 1.0 + _given(recipe.clip_high)


def _given(value: float | None) -> float:
    """A setting that the recipe's checks guarantee."""
    assert value is not None
    return value


SURROGATES: Mapping[str, Callable[[Recipe, Tokens], Surrogate]] = {
    "clip": clip,
    "cispo": cispo,
    "cispo_mask": cispo_mask,
    "minirl": minirl,
    "sapo": sapo,
    "gmpo": gmpo,
}
