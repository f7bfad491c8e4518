"""Estimates of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL divergence", 2020).

With k1 = logp - ref: k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1, and k3+ = k3's value with k2's gradient, which is
the gradient of the KL itself on-policy. The log-ratio is clamped to +-20 nats and k3 to 10; there the
gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from megarl.algorithms.ratios import bounded
from megarl.errors import UserError, did_you_mean

MAX_K3 = 10.0


def k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    # exp(-x) - 1 + x cancels near 0: expm1 keeps the digits
    return ((-log_ratio).expm1() + log_ratio).clamp(max=MAX_K3)


def k3_plus(log_ratio: Tensor) -> Tensor:
    with_gradient = k2(log_ratio)
    return with_gradient + (k3(log_ratio) - with_gradient).detach()


ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}


def kl_estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """float32 [T]: the estimate at each token; its gradient is with respect to `logprobs`.

    kind: k1 | k2 | k3 | k3+. logprobs, ref_logprobs: [T]. Raises UserError for an unknown kind, ValueError for two
    shapes.
    """
    if kind not in ESTIMATES:
        raise UserError(
            f"unknown KL estimate {kind!r}.{did_you_mean(kind, ESTIMATES)} Known: {', '.join(ESTIMATES)}."
        )
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs has shape {list(logprobs.shape)}, ref_logprobs {list(ref_logprobs.shape)}"
        )
    return ESTIMATES[kind](bounded(logprobs.float() - ref_logprobs.detach().float()))


def kl_clamped(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """bool [T]: tokens where `kl_estimate` was clamped."""
    log_ratio = logprobs.detach().float() - ref_logprobs.float()
    out = log_ratio != bounded(log_ratio)
    return out | (k3(bounded(log_ratio)) >= MAX_K3) if kind in ("k3", "k3+") else out
