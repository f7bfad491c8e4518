"""Importance ratios of the current policy to the old one, one per token (DESIGN "Ratios", formulas in
`parts.RATIOS`).

Log-ratios are float32 and clamped to +-20 nats before exp; a token's ratio has no gradient beyond the clamp.
A sequence ratio is GSPO-token's: the value is the response's, the gradient each token's own share of it. Its
mean is taken without gradient, so under context parallelism it needs no differentiable communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from megarl.algorithms.responses import Responses

MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio where exp is safe."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_gradient_of(value: Tensor, log_ratio: Tensor) -> Tensor:
    """exp(value), whose gradient is exp(value) times that of log_ratio. Both [T]; value has no gradient."""
    return (value + (log_ratio - log_ratio.detach())).exp()


def token_ratio(log_ratio: Tensor, mean_log_ratio: Tensor, responses: Responses) -> Tensor:
    """[T]: exp(logp - old)."""
    return bounded(log_ratio).exp()


def sequence_ratio(log_ratio: Tensor, mean_log_ratio: Tensor, responses: Responses) -> Tensor:
    """[T]: s_i at every token of response i (GSPO, Eq. 7 and 14). mean_log_ratio: float64 [R]."""
    return with_gradient_of(responses.spread(bounded(mean_log_ratio)), log_ratio)


RATIOS: Mapping[str, Callable[[Tensor, Tensor, Responses], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_ratio,
}
