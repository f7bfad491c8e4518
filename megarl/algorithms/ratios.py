"""The slot `ratio`: importance ratios of the current policy to the old one, one per token (DESIGN "Ratios").

Log-ratios are float32 and clamped to +-20 nats before exp; a token's ratio has no gradient beyond the clamp.
A sequence ratio is GSPO-token's: the value is the response's, the gradient each token's own share of it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megarl.algorithms.parts import part
from megarl.algorithms.responses import Responses

MAX_LOG_RATIO = 20.0


class LogRatios(NamedTuple):
    """What a ratio is made of.

    tokens: float32 [tokens], logp - old, with the policy's gradient; 0 where masked.
    means: float64 [responses], over the active tokens of each response, without gradient.
    """

    tokens: Tensor
    means: Tensor
    responses: Responses


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio where exp is safe."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_gradient_of(value: Tensor, log_ratio: Tensor) -> Tensor:
    """Return exp(value), whose gradient is exp(value) times that of log_ratio. Both [tokens]; value has none."""
    return (value + (log_ratio - log_ratio.detach())).exp()


@part("ratio", formula="r_t = exp(logp_t - old_t)", meaning="each token by itself")
def token(log_ratios: LogRatios) -> Tensor:
    return bounded(log_ratios.tokens).exp()


@part(
    "ratio",
    formula="r_t = s_i = exp(mean over active t of (logp_t - old_t))",
    meaning="one ratio for the whole response, one advantage per response",
    per_response=True,
    one_advantage=True,
)
def sequence(log_ratios: LogRatios) -> Tensor:
    """GSPO, Eq. 7, with the gradient of Eq. 14."""
    return _of_responses(log_ratios)


@part(
    "ratio",
    formula="r_t = sg(s_i) * exp(logp_t - sg(logp_t)); s_i = exp(mean over active t of (logp_t - old_t))",
    meaning="as sequence, with per-token advantages",
    per_response=True,
)
def sequence_token(log_ratios: LogRatios) -> Tensor:
    """GSPO-token, Eq. 14."""
    return _of_responses(log_ratios)


def _of_responses(log_ratios: LogRatios) -> Tensor:
    means = log_ratios.responses.spread(bounded(log_ratios.means))
    return with_gradient_of(means, log_ratios.tokens)
