"""The parts a recipe is made of, and the settings they read: names, formulas and defaults as data.

A recipe picks one part for each slot (advantage, ratio, surrogate, weights, KL, correction). A part owns the
settings that only it gives a meaning; a setting whose owner isn't picked is refused, so no value is ever
ignored in silence. The functions behind the names are in `advantages.py`, `ratios.py`, `surrogates.py`,
`weights.py`, `kl.py` and `corrections.py`.

Symbols: r_t ratio, A advantage, R reward, G responses of a group, |y| active tokens of a response, sg() no
gradient. Losses are minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One choice for a slot. settings: what only this part reads, with defaults."""

    formula: str
    meaning: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A value of a recipe: what it means and what it may be.

    kind: float, int, bool, or the tuple of words to choose from. above / at_least / at_most: bounds of a
    number. optional: None is a choice of its own (where the setting is owned by the part picked).
    """

    meaning: str
    kind: type | tuple[str, ...]
    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf
    optional: bool = False


SETTINGS: Mapping[str, Setting] = {
    "std": Setting("what a group's centred rewards are divided by", ("population", "bessel", "none")),
    "gamma": Setting("discount of GAE per token", float, at_least=0.0, at_most=1.0),
    "gae_lambda": Setting("lambda of GAE per token", float, at_least=0.0, at_most=1.0),
    "value_clip": Setting(
        "how far the critic's value may move from the old one; null = not clipped",
        float,
        above=0.0,
        optional=True,
    ),
    "clip_low": Setting("lower bound of the ratio is 1 - clip_low (gmpo: exp(-clip_low))", float, above=0.0),
    "clip_high": Setting(
        "upper bound of the ratio is 1 + clip_high (gmpo: exp(clip_high))", float, above=0.0
    ),
    "dual_clip": Setting(
        "bound of the ratio where A < 0 (PPO leaves it open); null = open", float, above=1.0, optional=True
    ),
    "tau_positive": Setting("temperature of the soft gate where A > 0", float, above=0.0),
    "tau_negative": Setting("temperature of the soft gate where A <= 0", float, above=0.0),
    "kl_coef": Setting("weight of the KL to the reference policy; 0 = only measured", float, at_least=0.0),
    "kl_in": Setting("where the KL acts", ("loss", "reward")),
    "correction_low": Setting("smallest trainer/engine weight that is kept", float, at_least=0.0),
    "correction_high": Setting("largest trainer/engine weight that is kept, or its cap", float, above=0.0),
    "entropy_coef": Setting("weight of the entropy bonus", float, at_least=0.0),
    "off_policy_delta": Setting(
        "leave out tokens with A < 0 of responses with mean(old - logp) above this many nats "
        "(DeepSeek-V3.2); null = keep all",
        float,
        above=0.0,
        optional=True,
    ),
    "old_logprobs": Setting(
        "where the old log-probabilities come from (auto: `resolve_sources`)",
        ("auto", "current", "recompute", "engine"),
    ),
    "routing_replay": Setting(
        "which routes an MoE policy replays (auto: `resolve_sources`)", ("auto", "off", "recorded", "engine")
    ),
    "minibatches": Setting("optimizer steps per rollout", int, at_least=1),
    "dynamic_sampling": Setting("sample until groups differ in reward; drop the others", bool),
}


ADVANTAGES: Mapping[str, Part] = {
    "grpo": Part(
        "A_i = (R_i - mean_group) / (std_group + 1e-6)",
        "reward relative to its group, in units of the group's spread",
        {"std": "population"},
    ),
    "dr_grpo": Part(
        "A_i = R_i - mean_group", "reward relative to its group; hard and easy prompts weigh alike"
    ),
    "rloo": Part(
        "A_i = R_i - mean_{j != i} R_j", "leave-one-out baseline: unbiased, G / (G - 1) times dr_grpo"
    ),
    "opo": Part(
        "A_i = R_i - sum_group(|y| R) / sum_group(|y|)",
        "length-weighted baseline, which has the least variance",
    ),
    "reinforce_pp": Part(
        "A_t = whiten over all active tokens of (R - kl_coef * sum_{i >= t} k1_i)",
        "no group: the whole batch is the baseline",
    ),
    "reinforce_pp_baseline": Part(
        "A_i = whiten over all active tokens of (R_i - mean_group)",
        "group baseline, spread of the whole batch",
    ),
    "remax": Part(
        "A_i = R_i - R(greedy response)", "baseline: the reward of the greedy response to the prompt"
    ),
    "gae": Part(
        "A_t = whiten(sum_k (gamma gae_lambda)^k delta_{t+k}), delta_t = R_t + gamma V_{t+1} - V_t",
        "a critic's values are the baseline, token by token",
        {"gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2},
    ),
}

RATIOS: Mapping[str, Part] = {
    "token": Part("r_t = exp(logp_t - old_t)", "each token by itself"),
    "sequence": Part(
        "r_t = s_i = exp(mean over active t of (logp_t - old_t))",
        "one ratio for the whole response, one advantage per response",
    ),
    "sequence_token": Part(
        "r_t = sg(s_i) * exp(logp_t - sg(logp_t)); s_i = exp(mean over active t of (logp_t - old_t))",
        "as sequence, with per-token advantages",
    ),
}

_OUTSIDE = "M_t = 0 where (A > 0 and r_t > 1 + clip_high) or (A < 0 and r_t < 1 - clip_low)"

SURROGATES: Mapping[str, Part] = {
    "clip": Part(
        "l_t = -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A); "
        "with dual_clip, where A < 0: -max(that min, dual_clip A)",
        "PPO's trust region: no gradient once the ratio has moved far enough",
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    ),
    "cispo": Part(
        "l_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A logp_t",
        "the weight is clipped, not the update: every token keeps a gradient",
        {"clip_low": 1.0, "clip_high": 4.0},
    ),
    "cispo_mask": Part(
        f"l_t = -M_t sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A logp_t; {_OUTSIDE}",
        "CISPO's unified form: tokens outside PPO's trust region are left out",
        {"clip_low": 1.0, "clip_high": 4.0},
    ),
    "minirl": Part(
        f"l_t = -M_t sg(r_t) A logp_t; {_OUTSIDE}",
        "importance-weighted REINFORCE, PPO's mask on staleness",
        {"clip_low": 0.2, "clip_high": 0.27},
    ),
    "sapo": Part(
        "l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A; tau = tau_positive where A > 0, else tau_negative",
        "a soft gate instead of a clip: the gradient fades with distance",
        {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "gmpo": Part(
        "l_i = -exp(mean over active t of x_t) A; "
        "x_t = min(log r_t, clip_high) where A > 0, max(log r_t, -clip_low) where A < 0",
        "geometric mean of the clipped token ratios: one outlier cannot dominate",
        {"clip_low": 0.4, "clip_high": 0.4},
    ),
}

WEIGHTS: Mapping[str, Part] = {
    "token_mean": Part("w_t = 1 / (active tokens of the batch)", "every token weighs the same"),
    "group_token_mean": Part(
        "w_t = 1 / (groups * active tokens of the group)",
        "every prompt weighs the same, and inside it every token",
    ),
    "sequence_mean": Part("w_t = 1 / (responses * |y|)", "every response weighs the same"),
    "constant": Part(
        "w_t = 1 / (responses * L_max), L_max = the generation budget",
        "every token weighs the same in every batch",
    ),
}

KLS: Mapping[str, Part] = {
    "none": Part("", "no reference policy"),
    "k1": Part(
        "kl_t = k1_t = logp_t - ref_t", "unbiased, can be negative", {"kl_coef": 0.001, "kl_in": "reward"}
    ),
    "k2": Part("kl_t = k1_t^2 / 2", "as a loss, the right gradient", {"kl_coef": 0.001, "kl_in": "loss"}),
    "k3": Part(
        "kl_t = exp(-k1_t) - 1 + k1_t",
        "unbiased and never negative; as a loss, a biased gradient",
        {"kl_coef": 0.001, "kl_in": "loss"},
    ),
    "k3+": Part(
        "kl_t = k3's value with k2's gradient",
        "low variance to read, the right gradient",
        {"kl_coef": 0.001, "kl_in": "loss"},
    ),
}

CORRECTIONS: Mapping[str, Part] = {
    "none": Part("", "old log-probabilities are taken as the sampler's"),
    "tis": Part(
        "c_t = min(exp(old_t - engine_t), correction_high)",
        "truncated importance sampling, token by token",
        {"correction_high": 2.0},
    ),
    "mis": Part(
        "c_t = exp(old_t - engine_t) inside [correction_low, correction_high], else 0",
        "masked importance sampling: tokens that disagree are left out",
        {"correction_low": 0.5, "correction_high": 2.0},
    ),
    "icepop": Part(
        "c_t = exp(old_t - engine_t) inside [correction_low, correction_high], else 0",
        "mis with IcePop's wider bounds, made for MoE",
        {"correction_low": 0.5, "correction_high": 5.0},
    ),
    "sequence_tis": Part(
        "c_i = min(exp(sum over active t of (old_t - engine_t)), correction_high)",
        "tis on the probability of the whole response",
        {"correction_high": 2.0},
    ),
    "sequence_mis": Part(
        "c_i = exp(sum over active t of (old_t - engine_t)) inside [correction_low, correction_high], else 0",
        "mis on the probability of the whole response",
        {"correction_low": 0.5, "correction_high": 2.0},
    ),
    "geometric_mis": Part(
        "c_i = exp(mean over active t of (old_t - engine_t)) inside [correction_low, correction_high], else "
        "0",
        "mis on the mean ratio: bounds that do not depend on the length",
        {"correction_low": 0.99, "correction_high": 1.01},
    ),
}

PARTS: Mapping[str, Mapping[str, Part]] = {
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "weights": WEIGHTS,
    "kl": KLS,
    "correction": CORRECTIONS,
}


def owners(setting: str) -> tuple[str, tuple[str, ...]] | None:
    """(slot, parts) that read a setting; None for one that every recipe has.

    >>> owners("dual_clip")
    ('surrogate', ('clip',))
    """
    for slot, parts in PARTS.items():
        names = tuple(name for name, part in parts.items() if setting in part.settings)
        if names:
            return slot, names
    return None
