"""The name, meaning and healthy range of every metric that the functions here return, as data for
docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class MetricInfo(NamedTuple):
    """meaning: one sentence. unit: what 1.0 means. healthy: the range of a well-going run, and what leaving
    it means. reduction: over what a mean is taken, or how the number is made of many."""

    meaning: str
    unit: str
    healthy: str
    reduction: str


def _quantiles(name: str, of: str, reduction_healthy: Mapping[str, str]) -> dict[str, MetricInfo]:
    return {
        f"{name}_{suffix}": MetricInfo(
            f"{quantile} of {of}.", "ratio", reduction_healthy.get(suffix, ""), "quantile"
        )
        for suffix, quantile in (("p01", "1% quantile"), ("p50", "Median"), ("p99", "99% quantile"))
    }


def _clip(suffix: str, which: str, healthy: str = "") -> dict[str, MetricInfo]:
    return {
        f"train/clip_fraction{suffix}": MetricInfo(f"Share of {which}.", "share", healthy, "token_mean"),
        f"train/seq_clip_fraction{suffix}": MetricInfo(
            f"Share of responses with at least one of the {which}.", "share", "", "response_mean"
        ),
    }


_CLIP_LEVEL = (
    "GRPO at 0.2: under 0.05. GSPO at 3e-4/4e-4: about 0.15, by design. 0 throughout: on-policy, or bounds "
    "too wide; rising: too many or too large steps per rollout."
)

METRICS: Mapping[str, MetricInfo] = {
    "train/loss": MetricInfo(
        "What this step minimised: policy, KL and entropy terms.",
        "loss",
        "Finite. Its size says little.",
        "mean",
    ),
    "train/pg_loss": MetricInfo(
        "The policy-gradient term of the loss.", "loss", "Near 0; its trend says little.", "mean"
    ),
    "train/kl_loss": MetricInfo(
        "The KL term of the loss, its coefficient included.", "loss", "Small.", "mean"
    ),
    "train/active_tokens": MetricInfo("Tokens that were trained on.", "tokens", "Above 0.", "sum"),
    "train/active_responses": MetricInfo(
        "Responses with a token that was trained on.", "responses", "Above 0.", "sum"
    ),
    "train/advantage_mean": MetricInfo("Mean advantage.", "reward", "Near 0.", "token_mean"),
    "train/advantage_std": MetricInfo(
        "Standard deviation of the advantage.", "reward", "Above 0. Near 0: nothing to learn.", "token_mean"
    ),
    "train/advantage_max": MetricInfo("Largest advantage.", "reward", "", "max"),
    "train/advantage_min": MetricInfo("Smallest advantage.", "reward", "", "min"),
    **_clip("", "active tokens whose update was held back at a bound of the ratio", _CLIP_LEVEL),
    **_clip("_low", "active tokens held back at the lower bound"),
    **_clip(
        "_high",
        "active tokens held back at the upper bound",
        "Well above the lower side while entropy falls: raise clip_high.",
    ),
    **_clip("_dual", "active tokens held back by the dual clip", "Near 0."),
    **_clip("_positive", "tokens with A > 0 that were held back"),
    **_clip("_negative", "tokens with A < 0 that were held back"),
    "train/ratio_mean": MetricInfo(
        "Mean of exp(logp - old) over tokens.",
        "ratio",
        "0.99 to 1.01. Off: old log-probabilities of another policy.",
        "token_mean",
    ),
    "train/ratio_max": MetricInfo(
        "Largest token ratio.",
        "ratio",
        "Dense: under 10. MoE without replay: spikes where experts change.",
        "max",
    ),
    "train/ratio_min": MetricInfo("Smallest token ratio.", "ratio", "", "min"),
    **_quantiles("train/ratio", "the token ratio", {"p99": "Under 1.5.", "p50": "1."}),
    "train/ratio_clamped": MetricInfo(
        "Tokens whose log-ratio was beyond +-20 nats.", "tokens", "0. Else: broken log-probabilities.", "sum"
    ),
    "train/seq_ratio_mean": MetricInfo(
        "Mean over responses of exp(mean log-ratio), GSPO's s_i.",
        "ratio",
        "0.999 to 1.001 within a rollout.",
        "response_mean",
    ),
    "train/seq_ratio_max": MetricInfo("Largest sequence ratio.", "ratio", "Under 1.05.", "max"),
    "train/seq_ratio_min": MetricInfo("Smallest sequence ratio.", "ratio", "Above 0.95.", "min"),
    **_quantiles(
        "train/seq_ratio", "the sequence ratio", {"p99": "Some times 1 + clip_high of GSPO at most."}
    ),
    "train/seq_ratio_clamped": MetricInfo(
        "Responses whose mean log-ratio was beyond +-20 nats.", "responses", "0.", "sum"
    ),
    "train/kl_old_k1": MetricInfo(
        "Estimate of KL(old || new): mean of old - logp; can be negative.",
        "nats",
        "Under 0.01.",
        "token_mean",
    ),
    "train/kl_old_k3": MetricInfo(
        "Estimate of KL(old || new): mean of r - 1 - log r; never negative.",
        "nats",
        "Under 0.01. Rising over a rollout's mini-batches is staleness; jumps are instability.",
        "token_mean",
    ),
    "train/ess": MetricInfo(
        "Effective sample size of the importance weights, as a share of the tokens.",
        "share",
        "Above 0.9. Low: a few tokens carry the update.",
        "token_mean",
    ),
    "train/correction_mean": MetricInfo(
        "Mean of the trainer/engine weight after capping and masking.", "ratio", "0.95 to 1.05.", "token_mean"
    ),
    "train/correction_truncated": MetricInfo(
        "Share of tokens whose weight was capped.", "share", "Under 0.01.", "token_mean"
    ),
    "train/correction_masked": MetricInfo(
        "Share of tokens left out because trainer and engine disagree.", "share", "Under 0.01.", "token_mean"
    ),
    "train/off_policy_masked": MetricInfo(
        "Share of tokens left out because the policy moved away from their response.",
        "share",
        "Under 0.1.",
        "token_mean",
    ),
    "train/kl": MetricInfo(
        "Estimate of KL(policy || reference), by the recipe's kind.",
        "nats",
        "Under 1, moving slowly.",
        "token_mean",
    ),
    "train/kl_clamped": MetricInfo("Tokens whose KL estimate was clamped.", "tokens", "0.", "sum"),
    "train/entropy": MetricInfo(
        "Entropy of the next-token distribution at the sampling temperature.",
        "nats",
        "Falls slowly. Collapsing towards 0: exploration is over, raise clip_high; rising: instability.",
        "token_mean",
    ),
    "train/zero_variance_groups": MetricInfo(
        "Share of groups of two or more whose rewards are all equal: they teach nothing.",
        "share",
        "Under 0.5. Above: prompts too easy or too hard, or sample dynamically.",
        "group_mean",
    ),
    "train/groups_of_one": MetricInfo(
        "Groups with a single scored response: a group baseline gives them advantage 0.",
        "groups",
        "0.",
        "sum",
    ),
    "train/unscored_responses": MetricInfo("Responses without a reward: masked.", "responses", "0.", "sum"),
    "critic/value_loss": MetricInfo("The critic's loss.", "loss", "Falls.", "mean"),
    "critic/value_clip_fraction": MetricInfo(
        "Share of tokens whose value was clipped.", "share", "Under 0.2.", "token_mean"
    ),
    "critic/value_mean": MetricInfo("Mean value.", "reward", "Follows critic/return_mean.", "token_mean"),
    "critic/value_std": MetricInfo("Standard deviation of the value.", "reward", "", "token_mean"),
    "critic/return_mean": MetricInfo("Mean return.", "reward", "Rises.", "token_mean"),
    "critic/return_std": MetricInfo("Standard deviation of the return.", "reward", "", "token_mean"),
    "critic/error_mean": MetricInfo("Mean of return - value.", "reward", "Near 0.", "token_mean"),
    "critic/error_std": MetricInfo(
        "Standard deviation of return - value.",
        "reward",
        "Below critic/return_std: the critic explains some of the return.",
        "token_mean",
    ),
    "mismatch/abs_diff_mean": MetricInfo(
        "Mean |trainer - engine| log-probability.",
        "nats",
        "bfloat16: 0.01 to 0.03. float32: under 1e-4.",
        "token_mean",
    ),
    "mismatch/abs_diff_max": MetricInfo("Largest |trainer - engine| log-probability.", "nats", "", "max"),
    "mismatch/k1": MetricInfo("k1 estimate of KL(engine || trainer).", "nats", "Near 0.", "token_mean"),
    "mismatch/k3": MetricInfo(
        "k3 estimate of KL(engine || trainer).",
        "nats",
        "Dense: under 1e-3. MoE without replay: about 1.5e-3, with R3 half of it; far above: they disagree.",
        "token_mean",
    ),
    "mismatch/ratio_outside": MetricInfo(
        "Share of tokens whose trainer/engine ratio is outside [1/2, 2].",
        "share",
        "Under 1e-3.",
        "token_mean",
    ),
    **_quantiles("mismatch/ratio", "the trainer/engine ratio of tokens", {"p50": "1."}),
    **_quantiles(
        "mismatch/seq_ratio", "the trainer/engine ratio of responses, exp(mean difference)", {"p50": "1."}
    ),
    "mismatch/seq_ratio_max": MetricInfo(
        "Largest trainer/engine sequence ratio.", "ratio", "Under 1.01.", "max"
    ),
    "mismatch/seq_ratio_min": MetricInfo(
        "Smallest trainer/engine sequence ratio.", "ratio", "Above 0.99.", "min"
    ),
    "mismatch/tokens": MetricInfo("Tokens compared.", "tokens", "Above 0.", "sum"),
}
