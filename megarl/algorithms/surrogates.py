"""The slot `surrogate`: per-token policy losses, to be minimised.

Each takes the ratios and advantages of all tokens and returns the loss of each, with the tokens whose update
was held back on the low and on the high side. Masked tokens arrive with log-ratio and advantage 0.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.parts import Setting, part
from megarl.algorithms.ratios import bounded, with_gradient_of
from megarl.algorithms.responses import Responses


class Tokens(NamedTuple):
    """What a surrogate sees, float32 [tokens]; ratio, log_ratio and logprobs carry the policy's gradient.

    ratio: the recipe's ratio. log_ratio: each token's own, logp - old.
    """

    ratio: Tensor
    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor
    responses: Responses


class TokenLosses(NamedTuple):
    """loss: float32 [tokens]. low, high: bool [tokens], held back at the lower, upper bound; None = there are
    no bounds. dual: bool [tokens], held back by the dual clip; None = there is none."""

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


ClipLow = Annotated[float, Setting("lower bound of the ratio is 1 - clip_low", above=0.0, at_most=1.0)]
ClipHigh = Annotated[float, Setting("upper bound of the ratio is 1 + clip_high", above=0.0)]

_OUTSIDE = "M_t = 0 where (A > 0 and r_t > 1 + clip_high) or (A < 0 and r_t < 1 - clip_low)"


@part(
    "surrogate",
    formula="l_t = -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A); "
    "with dual_clip, where A < 0: -max(that min, dual_clip A)",
    meaning="PPO's trust region: no gradient once the ratio has moved far enough",
)
def clip(
    tokens: Tokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: Annotated[
        float | None, Setting("bound of the ratio where A < 0 (PPO leaves it open); null = open", above=1.0)
    ] = None,
) -> TokenLosses:
    """PPO's clipped objective (1707.06347, Eq. 7), with the dual clip of 1912.09729.

    min(r A, clip(r) A) is r A with r held at the bound that A pushes past.
    """
    low, high = _outside(tokens, clip_low, clip_high)
    held = torch.where(low, 1.0 - clip_low, torch.where(high, 1.0 + clip_high, tokens.ratio))
    dual = None
    if dual_clip is not None:
        dual = (tokens.advantages < 0) & (tokens.ratio.detach() > dual_clip)
        held = torch.where(dual, dual_clip, held)
    return TokenLosses(-(tokens.advantages * held), low, high, dual)


@part(
    "surrogate",
    formula="l_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A logp_t",
    meaning="the weight is clipped, not the update: every token keeps a gradient",
)
def cispo(tokens: Tokens, *, clip_low: ClipLow = 1.0, clip_high: ClipHigh = 4.0) -> TokenLosses:
    """Clipped, detached importance weight times policy gradient (2506.13585, Eq. 4)."""
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    ratio = tokens.ratio.detach()
    loss = -(ratio.clamp(lower, upper) * tokens.advantages) * tokens.logprobs
    return TokenLosses(loss, ratio < lower, ratio > upper)


@part(
    "surrogate",
    formula=f"l_t = -M_t sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A logp_t; {_OUTSIDE}",
    meaning="CISPO's unified form: tokens outside PPO's trust region are left out",
)
def cispo_mask(tokens: Tokens, *, clip_low: ClipLow = 1.0, clip_high: ClipHigh = 4.0) -> TokenLosses:
    """`cispo` without the tokens outside PPO's trust region (2506.13585, Eq. 6 and 7)."""
    weight = tokens.ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return _masked(tokens, weight, clip_low, clip_high)


@part(
    "surrogate",
    formula=f"l_t = -M_t sg(r_t) A logp_t; {_OUTSIDE}",
    meaning="importance-weighted REINFORCE, PPO's mask on staleness",
)
def minirl(tokens: Tokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.27) -> TokenLosses:
    """Importance-weighted REINFORCE inside PPO's trust region (2512.01374). The mismatch factor is a correction."""
    return _masked(tokens, tokens.ratio.detach(), clip_low, clip_high)


@part(
    "surrogate",
    formula="l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A; tau = tau_positive where A > 0, else tau_negative",
    meaning="a soft gate instead of a clip: the gradient fades with distance",
    token_ratio=True,
)
def sapo(
    tokens: Tokens,
    *,
    tau_positive: Annotated[float, Setting("temperature of the soft gate where A > 0", above=0.0)] = 1.0,
    tau_negative: Annotated[float, Setting("temperature of the soft gate where A <= 0", above=0.0)] = 1.05,
) -> TokenLosses:
    """A sigmoid gate on the ratio (2511.20347): slope 1 at ratio 1, fading on both sides."""
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0))
    return TokenLosses(-(4.0 * tokens.advantages / tau) * gate)


@part(
    "surrogate",
    formula="l_i = -exp(mean over active t of x_t) A; "
    "x_t = min(log r_t, clip_high) where A > 0, max(log r_t, -clip_low) where A < 0",
    meaning="geometric mean of the clipped token ratios: one outlier cannot dominate",
    token_ratio=True,
    per_response=True,
)
def gmpo(
    tokens: Tokens,
    *,
    clip_low: Annotated[float, Setting("lower bound of the ratio is exp(-clip_low)", above=0.0)] = 0.4,
    clip_high: Annotated[float, Setting("upper bound of the ratio is exp(clip_high)", above=0.0)] = 0.4,
) -> TokenLosses:
    """Geometric mean of sign-aware clipped ratios (2507.20673), at every token of its response.

    With weights 1 / |y| the tokens' gradients add up to the geometric mean's own: a clipped token has none.
    """
    high = (tokens.advantages > 0) & (tokens.log_ratio.detach() > clip_high)
    low = (tokens.advantages < 0) & (tokens.log_ratio.detach() < -clip_low)
    clipped = torch.where(high, clip_high, torch.where(low, -clip_low, tokens.log_ratio))
    mean = tokens.responses.spread(bounded(tokens.responses.mean(clipped)))
    return TokenLosses(-with_gradient_of(mean, clipped) * tokens.advantages, low, high)


def _masked(tokens: Tokens, weight: Tensor, clip_low: float, clip_high: float) -> TokenLosses:
    low, high = _outside(tokens, clip_low, clip_high)
    kept = torch.where(low | high, 0.0, weight * tokens.advantages)
    return TokenLosses(-kept * tokens.logprobs, low, high)


def _outside(tokens: Tokens, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that already moved past the bound their advantage pushes towards: (low, high)."""
    ratio = tokens.ratio.detach()
    low = (tokens.advantages < 0) & (ratio < 1.0 - clip_low)
    return low, (tokens.advantages > 0) & (ratio > 1.0 + clip_high)
