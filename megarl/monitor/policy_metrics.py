"""What the functions of `megarl/algorithms` measure: the policy's and the critic's loss, advantages, mismatch."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.monitor.registry import MetricSpec


def _quantiles(name: str, what: str, healthy: Mapping[str, str]) -> tuple[MetricSpec, ...]:
    return tuple(
        MetricSpec(f"{name}_{suffix}", f"{quantile} of {what}.", "ratio", healthy.get(suffix, ""), "quantile")
        for suffix, quantile in (("p01", "1% quantile"), ("p50", "Median"), ("p99", "99% quantile"))
    )


def _clip(suffix: str, which: str, healthy: str = "", console: str | None = None) -> tuple[MetricSpec, ...]:
    return (
        MetricSpec(
            f"train/clip_fraction{suffix}", f"Share of {which}.", "share", healthy, "token_mean", console
        ),
        MetricSpec(
            f"train/seq_clip_fraction{suffix}",
            f"Share of responses with at least one of the {which}.",
            "share",
            "",
            "response_mean",
        ),
    )


_CLIP_LEVEL = (
    "GRPO at 0.2: under 0.05. GSPO at 3e-4/4e-4: about 0.15, by design. 0 throughout: on-policy, or bounds "
    "too wide; rising: too many or too large steps per rollout."
)

POLICY: tuple[MetricSpec, ...] = (
    MetricSpec(
        "train/loss",
        "What this step minimised: policy, KL and entropy terms.",
        "loss",
        "Finite. Its size says little.",
        "mean",
    ),
    MetricSpec(
        "train/pg_loss",
        "The policy-gradient term of the loss.",
        "loss",
        "Near 0; its trend says little.",
        "mean",
    ),
    MetricSpec(
        "train/kl_loss", "The KL term of the loss, its coefficient included.", "loss", "Small.", "mean"
    ),
    MetricSpec("train/active_tokens", "Tokens that were trained on.", "tokens", "Above 0.", "sum"),
    MetricSpec(
        "train/active_responses",
        "Responses with a token that was trained on.",
        "responses",
        "Above 0.",
        "sum",
    ),
    MetricSpec("train/advantage_mean", "Mean advantage.", "reward", "Near 0.", "token_mean"),
    MetricSpec(
        "train/advantage_std",
        "Standard deviation of the advantage.",
        "reward",
        "Above 0. Near 0: nothing to learn.",
        "token_mean",
    ),
    MetricSpec("train/advantage_max", "Largest advantage.", "reward", "", "max"),
    MetricSpec("train/advantage_min", "Smallest advantage.", "reward", "", "min"),
    *_clip(
        "", "active tokens whose update was held back at a bound of the ratio", _CLIP_LEVEL, console="clip"
    ),
    *_clip("_low", "active tokens held back at the lower bound"),
    *_clip(
        "_high",
        "active tokens held back at the upper bound",
        "Well above the lower side while entropy falls: raise clip_high.",
    ),
    *_clip("_dual", "active tokens held back by the dual clip", "Near 0."),
    *_clip("_positive", "tokens with A > 0 that were held back"),
    *_clip("_negative", "tokens with A < 0 that were held back"),
    MetricSpec(
        "train/ratio_mean",
        "Mean of exp(logp - old) over tokens.",
        "ratio",
        "0.99 to 1.01. Off: old log-probabilities of another policy.",
        "token_mean",
    ),
    MetricSpec(
        "train/ratio_max",
        "Largest token ratio.",
        "ratio",
        "Dense: under 10. MoE without replay: spikes where experts change.",
        "max",
    ),
    MetricSpec("train/ratio_min", "Smallest token ratio.", "ratio", "", "min"),
    *_quantiles("train/ratio", "the token ratio", {"p99": "Under 1.5.", "p50": "1."}),
    MetricSpec(
        "train/ratio_clamped",
        "Tokens whose log-ratio was beyond +-20 nats.",
        "tokens",
        "0. Else: broken log-probabilities.",
        "sum",
    ),
    MetricSpec(
        "train/seq_ratio_mean",
        "Mean over responses of exp(mean log-ratio), GSPO's s_i.",
        "ratio",
        "0.999 to 1.001 within a rollout.",
        "response_mean",
    ),
    MetricSpec("train/seq_ratio_max", "Largest sequence ratio.", "ratio", "Under 1.05.", "max"),
    MetricSpec("train/seq_ratio_min", "Smallest sequence ratio.", "ratio", "Above 0.95.", "min"),
    *_quantiles(
        "train/seq_ratio", "the sequence ratio", {"p99": "Some times 1 + clip_high of GSPO at most."}
    ),
    MetricSpec(
        "train/seq_ratio_clamped",
        "Responses whose mean log-ratio was beyond +-20 nats.",
        "responses",
        "0.",
        "sum",
    ),
    MetricSpec(
        "train/kl_old_k1",
        "Estimate of KL(old || new): mean of old - logp; can be negative.",
        "nats",
        "Under 0.01.",
        "token_mean",
    ),
    MetricSpec(
        "train/kl_old_k3",
        "Estimate of KL(old || new): mean of r - 1 - log r; never negative.",
        "nats",
        "Under 0.01. Rising over a rollout's mini-batches is staleness; jumps are instability.",
        "token_mean",
    ),
    MetricSpec(
        "train/ess",
        "Effective sample size of the importance weights, as a share of the tokens.",
        "share",
        "Above 0.9. Low: a few tokens carry the update.",
        "token_mean",
    ),
    MetricSpec(
        "train/correction_mean",
        "Mean of the trainer/engine weight after capping and masking.",
        "ratio",
        "0.95 to 1.05.",
        "token_mean",
    ),
    MetricSpec(
        "train/correction_truncated",
        "Share of tokens whose weight was capped.",
        "share",
        "Under 0.01.",
        "token_mean",
    ),
    MetricSpec(
        "train/correction_masked",
        "Share of tokens left out because trainer and engine disagree.",
        "share",
        "Under 0.01.",
        "token_mean",
    ),
    MetricSpec(
        "train/off_policy_masked",
        "Share of tokens left out because the policy moved away from their response.",
        "share",
        "Under 0.1.",
        "token_mean",
    ),
    MetricSpec(
        "train/kl",
        "Estimate of KL(policy || reference), by the recipe's kind.",
        "nats",
        "Under 1, moving slowly.",
        "token_mean",
    ),
    MetricSpec("train/kl_clamped", "Tokens whose KL estimate was clamped.", "tokens", "0.", "sum"),
    MetricSpec(
        "train/entropy",
        "Entropy of the next-token distribution at the sampling temperature.",
        "nats",
        "Falls slowly. Collapsing towards 0: exploration is over, raise clip_high; rising: instability.",
        "token_mean",
        console="ent",
    ),
    MetricSpec(
        "train/zero_variance_groups",
        "Share of groups of two or more whose rewards are all equal: they teach nothing.",
        "share",
        "Under 0.5. Above: prompts too easy or too hard, or sample dynamically.",
        "group_mean",
    ),
    MetricSpec(
        "train/groups_of_one",
        "Groups with a single scored response: a group baseline gives them advantage 0.",
        "groups",
        "0.",
        "sum",
    ),
    MetricSpec("train/unscored_responses", "Responses without a reward: masked.", "responses", "0.", "sum"),
    MetricSpec("critic/value_loss", "The critic's loss.", "loss", "Falls.", "mean"),
    MetricSpec(
        "critic/value_clip_fraction",
        "Share of tokens whose value was clipped.",
        "share",
        "Under 0.2.",
        "token_mean",
    ),
    MetricSpec("critic/value_mean", "Mean value.", "reward", "Follows critic/return_mean.", "token_mean"),
    MetricSpec("critic/value_std", "Standard deviation of the value.", "reward", "", "token_mean"),
    MetricSpec("critic/return_mean", "Mean return.", "reward", "Rises.", "token_mean"),
    MetricSpec("critic/return_std", "Standard deviation of the return.", "reward", "", "token_mean"),
    MetricSpec("critic/error_mean", "Mean of return - value.", "reward", "Near 0.", "token_mean"),
    MetricSpec(
        "critic/error_std",
        "Standard deviation of return - value.",
        "reward",
        "Below critic/return_std: the critic explains some of the return.",
        "token_mean",
    ),
    MetricSpec(
        "mismatch/abs_diff_mean",
        "Mean |trainer - engine| log-probability.",
        "nats",
        "bfloat16: 0.01 to 0.03. float32: under 1e-4.",
        "token_mean",
    ),
    MetricSpec("mismatch/abs_diff_max", "Largest |trainer - engine| log-probability.", "nats", "", "max"),
    MetricSpec("mismatch/k1", "k1 estimate of KL(engine || trainer).", "nats", "Near 0.", "token_mean"),
    MetricSpec(
        "mismatch/k3",
        "k3 estimate of KL(engine || trainer).",
        "nats",
        "Dense: under 1e-3. MoE without replay: about 1.5e-3, with R3 half of it; far above: they disagree.",
        "token_mean",
        console="k3",
    ),
    MetricSpec(
        "mismatch/ratio_outside",
        "Share of tokens whose trainer/engine ratio is outside [1/2, 2].",
        "share",
        "Under 1e-3.",
        "token_mean",
    ),
    *_quantiles("mismatch/ratio", "the trainer/engine ratio of tokens", {"p50": "1."}),
    *_quantiles(
        "mismatch/seq_ratio", "the trainer/engine ratio of responses, exp(mean difference)", {"p50": "1."}
    ),
    MetricSpec(
        "mismatch/seq_ratio_max", "Largest trainer/engine sequence ratio.", "ratio", "Under 1.01.", "max"
    ),
    MetricSpec(
        "mismatch/seq_ratio_min", "Smallest trainer/engine sequence ratio.", "ratio", "Above 0.99.", "min"
    ),
    MetricSpec("mismatch/tokens", "Tokens compared.", "tokens", "Above 0.", "sum"),
)
