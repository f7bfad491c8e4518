"""The slot `kl`: estimates of KL(policy || reference) from sampled tokens.

With k1 = logp - ref: k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1, and k3+ = k3's value with k2's gradient, which is
the gradient of the KL itself on-policy. The log-ratio is clamped to +-20 nats and k3 to 10; there the gradient is 0.
Source: Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megarl.algorithms.parts import absent, part
from megarl.algorithms.ratios import bounded

MAX_K3 = 10.0


class KLEstimate(NamedTuple):
    """value: float32 [tokens], with the gradient it is to have. clamped: bool [tokens] where it was, or None."""

    value: Tensor
    clamped: Tensor | None = None


NONE = absent("kl", "no reference policy")


@part(
    "kl",
    formula="kl_t = k1_t = logp_t - ref_t",
    meaning="unbiased, can be negative",
    defaults={"kl_in": "reward"},
    refused={
        "kl_in": {
            "loss": "as a loss, k1's gradient is zero on average and constrains nothing: use k2 or k3+, or set "
            "kl_in: reward"
        }
    },
)
def k1(log_ratio: Tensor) -> KLEstimate:
    return KLEstimate(log_ratio)


@part("kl", formula="kl_t = k1_t^2 / 2", meaning="as a loss, the right gradient")
def k2(log_ratio: Tensor) -> KLEstimate:
    return KLEstimate(0.5 * log_ratio.square())


@part(
    "kl",
    formula="kl_t = exp(-k1_t) - 1 + k1_t",
    meaning="unbiased and never negative; as a loss, a biased gradient",
)
def k3(log_ratio: Tensor) -> KLEstimate:
    # exp(-x) - 1 + x cancels near 0: expm1 keeps the digits
    value = ((-log_ratio).expm1() + log_ratio).clamp(max=MAX_K3)
    return KLEstimate(value, value.detach() >= MAX_K3)


@part(
    "kl",
    name="k3+",
    formula="kl_t = k3's value with k2's gradient",
    meaning="low variance to read, the right gradient",
    refused={
        "kl_in": {
            "reward": "k3+ is about the gradient, and a reward has none: use k1 or k3 with kl_in: reward"
        }
    },
)
def k3_plus(log_ratio: Tensor) -> KLEstimate:
    with_gradient, (value, clamped) = k2(log_ratio).value, k3(log_ratio)
    return KLEstimate(with_gradient + (value - with_gradient).detach(), clamped)


def kl_estimate(
    estimate: Callable[[Tensor], KLEstimate], logprobs: Tensor, ref_logprobs: Tensor
) -> KLEstimate:
    """Return the estimate at each token; its gradient is with respect to `logprobs`.

    estimate: a part. logprobs, ref_logprobs: [tokens]. Clamped tokens are those of the log-ratio, too. Raises
    ValueError for two shapes.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs has shape {list(logprobs.shape)}, ref_logprobs {list(ref_logprobs.shape)}"
        )
    log_ratio = logprobs.float() - ref_logprobs.detach().float()
    value, clamped = estimate(bounded(log_ratio))
    far = log_ratio.detach() != bounded(log_ratio.detach())
    return KLEstimate(value, far if clamped is None else far | clamped)
