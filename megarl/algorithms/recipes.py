"""The table of objectives.

A row names its parts and what differs from the parts' own defaults, or from its `base`. The ratio is `token` and the
surrogate `clip` where a row names no other.
Where a row deviates from its paper, its description says so. Figures without a paper are ours and say that too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megarl.algorithms.parts import SLOTS, builtin_parts, find_part
from megarl.algorithms.recipe import COMMON, FIELDS, Recipe
from megarl.errors import UserError, did_you_mean

_NEEDED = ("advantage", "ratio", "surrogate", "weights")

_ROWS: tuple[Mapping[str, object], ...] = (
    {
        "name": "ppo",
        "title": "PPO with a critic",
        "description": "A critic's values give each token its own advantage; the ratio is clipped, and for "
        "bad actions bounded from above too (dual clip). gamma = gae_lambda = 1 as in Open-Reasoner-Zero "
        "(2503.24290): rewards come at the end of long responses, and a smaller lambda forgets them. Its "
        "second model pays where rewards come inside the response.",
        "source": "Schulman et al. 2017 (1707.06347); GAE 1506.02438; dual clip: Ye et al. 2019 (1912.09729)",
        "advantage": "gae",
        "weights": "token_mean",
        "dual_clip": 3.0,
    },
    {
        "name": "grpo",
        "title": "Group relative policy optimization",
        "description": "No critic: the baseline is the mean reward of the group, in units of its spread. "
        "Each response weighs the same, so a token of a long response weighs less. k3 KL to the reference "
        "in the loss, as in DeepSeekMath; kl: none saves the reference pass. The population std is the "
        "papers'; verl, TRL, OpenRLHF and slime use Bessel's (std: bessel).",
        "source": "Shao et al. 2024, DeepSeekMath (2402.03300), Eq. 3",
        "advantage": "grpo",
        "weights": "sequence_mean",
        "kl": "k3",
        "kl_coef": 0.04,
    },
    {
        "name": "dapo",
        "title": "Decoupled clip and dynamic sampling",
        "description": "GRPO with a higher upper bound (rare tokens may grow, entropy stays), token-level "
        "weights (long responses are not diluted), no KL, and groups resampled until they differ in reward. "
        "Weights are verl's reading, one mean over all tokens of the batch; Eq. 8 as printed is weights: "
        "group_token_mean. The soft overlong punishment belongs to the reward (`rewards.soft_overlong`). "
        "Its ablation on AIME24: 30 naive, 36 with overlong filtering, 38 clip-higher, 41 soft overlong, 42 "
        "token-level, 50 dynamic sampling.",
        "source": "Yu et al. 2025 (2503.14476), Eq. 8 to 13",
        "advantage": "grpo",
        "weights": "token_mean",
        "clip_high": 0.28,
        "minibatches": 16,
        "dynamic_sampling": True,
    },
    {
        "name": "dr_grpo",
        "title": "GRPO done right",
        "description": "GRPO without its two biases: no division by the group's std (which weighs very easy "
        "and very hard prompts up) and no division by the response's length (which lets wrong answers grow "
        "long). Tokens are divided by the generation budget, a constant.",
        "source": "Liu et al. 2025 (2503.20783)",
        "advantage": "dr_grpo",
        "weights": "constant",
    },
    {
        "name": "cispo",
        "title": "Clipped importance-sampling weights",
        "description": "The importance weight is clipped and detached, the update never is: rare tokens "
        "that open a new line of thought keep their gradient. The paper tunes only eps_high; clip_low 1.0 "
        "leaves the lower side open, clip_high 4.0 caps the weight at 5 (the figures are ours).",
        "source": "MiniMax-M1 2025 (2506.13585), Eq. 4 and 5",
        "advantage": "grpo",
        "surrogate": "cispo",
        "weights": "token_mean",
        "minibatches": 16,
    },
    {
        "base": "cispo",
        "name": "cispo_mask",
        "title": "CISPO in its unified mask form",
        "description": "CISPO with tokens outside PPO's trust region left out: the form the paper uses to "
        "show PPO and CISPO as two settings of one objective.",
        "source": "MiniMax-M1 2025 (2506.13585), Eq. 6 and 7",
        "surrogate": "cispo_mask",
    },
    {
        "name": "gspo",
        "title": "Group sequence policy optimization",
        "description": "Reward, ratio and clip all belong to the whole response. The mean log-ratio "
        "averages out the token-wise jumps that changing experts cause, so an MoE trains without Routing "
        "Replay, and the engine's own log-probabilities are precise enough to be the old ones: no recompute "
        "pass. Bounds are some hundred times tighter than GRPO's because the mean ratio moves that much "
        "less; about 0.15 of the tokens are clipped, by design.",
        "source": "Zheng et al. 2025 (2507.18071), Eq. 5 to 7",
        "advantage": "grpo",
        "ratio": "sequence",
        "weights": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "old_logprobs": "engine",
        "routing_replay": "off",
        "minibatches": 4,
    },
    {
        "base": "gspo",
        "name": "gspo_token",
        "title": "GSPO with per-token advantages",
        "description": "GSPO's ratio and clip, written so that each token may have its own advantage "
        "(multi-turn, process rewards). With one advantage per response it is GSPO, value and gradient.",
        "source": "Zheng et al. 2025 (2507.18071), Eq. 13 to 15",
        "ratio": "sequence_token",
    },
    {
        "name": "reinforce_pp",
        "title": "REINFORCE++",
        "description": "No critic and no group: the KL-penalised reward, whitened over all tokens of the "
        "global batch. One response per prompt is enough. The k1 KL acts in the reward, token by token "
        "(kl_coef 0.001 is ours).",
        "source": "Hu et al. 2025 (2501.03262)",
        "advantage": "reinforce_pp",
        "weights": "token_mean",
        "kl": "k1",
    },
    {
        "name": "reinforce_pp_baseline",
        "title": "REINFORCE++ with a group baseline",
        "description": "The group's mean as baseline, the spread of the whole batch as unit: no group is "
        "blown up because its rewards happen to be close. k2 KL as a separate loss (kl_coef 0.001 is ours). "
        "Deviation: whitening would give a group without any spread a small common advantage; here it is "
        "exactly 0, as everywhere.",
        "source": "Hu et al. 2025 (2501.03262)",
        "advantage": "reinforce_pp_baseline",
        "weights": "token_mean",
        "kl": "k2",
    },
    {
        "name": "rloo",
        "title": "REINFORCE leave-one-out",
        "description": "Each response is compared with the mean of the others: unbiased at any group size. "
        "The paper is strictly on-policy REINFORCE; here the clip never binds with one mini-batch (same "
        "gradient) and guards several. The paper's KL in the reward: kl: k1.",
        "source": "Kool et al. 2019; Ahmadian et al. 2024 (2402.14740)",
        "advantage": "rloo",
        "weights": "token_mean",
    },
    {
        "name": "remax",
        "title": "REINFORCE with the greedy response as baseline",
        "description": "One greedy response per prompt is the baseline: a group of one will do, at the cost "
        "of one more response to sample and score. The clip never binds with one mini-batch (the paper's "
        "REINFORCE) and guards several.",
        "source": "Li et al. 2023 (2310.10505)",
        "advantage": "remax",
        "weights": "token_mean",
    },
    {
        "name": "opo",
        "title": "On-policy RL with the optimal reward baseline",
        "description": "The baseline that minimises the gradient's variance, under the assumption that a "
        "response's gradient grows with its length. No KL, no entropy bonus, exactly on-policy: keep "
        "minibatches: 1, where the clip never binds.",
        "source": "Hao et al. 2025 (2505.23585)",
        "advantage": "opo",
        "weights": "token_mean",
    },
    {
        "name": "sapo",
        "title": "Soft adaptive policy optimization",
        "description": "A sigmoid gate on each token's ratio in place of a clip: the gradient fades "
        "smoothly as a token leaves the old policy, faster where A <= 0. One far-off token costs its "
        "response only that token.",
        "source": "Gao et al. 2025 (2511.20347)",
        "advantage": "grpo",
        "surrogate": "sapo",
        "weights": "sequence_mean",
        "routing_replay": "off",
        "minibatches": 4,
    },
    {
        "name": "gmpo",
        "title": "Geometric-mean policy optimization",
        "description": "The geometric mean of a response's token ratios, each clipped in log space on the "
        "side its advantage pushes to: wide bounds, yet no outlier token dominates. clip_low and clip_high "
        "are in nats: bounds e^-0.4 and e^0.4.",
        "source": "Zhao et al. 2025 (2507.20673)",
        "advantage": "grpo",
        "surrogate": "gmpo",
        "weights": "sequence_mean",
    },
    {
        "name": "minirl",
        "title": "MiniRL",
        "description": "REINFORCE with the weight pi/mu = mismatch factor (old/engine, truncated) times "
        "staleness factor (pi/old), PPO's mask on the staleness alone, R - mean as advantage and no "
        "division by length: the first-order approximation of the sequence objective, valid while both "
        "factors stay near 1. Its paper's findings for MoE: on-policy, this alone is most stable; with 2 "
        "mini-batches add recorded routes (R2), with 4 and 8 the engine's (R3). The paper sums over tokens; "
        "`constant` is that sum, scaled.",
        "source": "Zheng et al. 2025 (2512.01374)",
        "advantage": "dr_grpo",
        "surrogate": "minirl",
        "weights": "constant",
        "correction": "tis",
        "correction_high": 5.0,
    },
)


def make_recipe(mapping: Mapping[str, object]) -> Recipe:
    """Return a recipe from plain data, as it stands in a user's YAML.

    Three forms: {"name": "gspo", "clip_low": 3e-4} is a row of the table with changes; {"base": "gspo",
    "name": "mine", ...} is the same under a name of its own; {"name": "mine", "advantage": ..., "ratio": ...,
    "surrogate": ..., "weights": ..., ...} is composed from parts. Picking another part for a slot brings that
    part's defaults and drops the settings of the part it replaces. A part of the user's own is named by its
    import path, `my_package.losses:soft_clip`.

    Raises UserError, with suggestions, for unknown names and fields, and for whatever `Recipe` refuses.
    """
    given = dict(mapping)
    base = given.pop("base", None)
    composed = base is None and all(slot in given for slot in _NEEDED)
    name = str(given.get("name", base or "custom"))
    if composed and name not in RECIPES:
        return _build(None, given | {"name": name})
    row = str(base if base is not None else name)
    if row not in RECIPES:
        missing = [slot for slot in _NEEDED if slot not in given]
        compose = f" (To compose your own, give {', '.join(missing)} too.)" if missing else ""
        raise UserError(
            f"unknown algorithm {row!r}.{did_you_mean(row, RECIPES)} Known: {', '.join(RECIPES)}.{compose}"
        )
    return _build(RECIPES[row], given | {"name": name})


def get_recipe(name: str, **overrides: object) -> Recipe:
    """Return a row of the table, with changes: `get_recipe("gspo", clip_low=2e-4)`. See `make_recipe`."""
    return make_recipe({"name": name} | overrides if name in RECIPES else {"base": name} | overrides)


def _build(base: Recipe | None, changes: Mapping[str, object]) -> Recipe:
    """`changes` over the row `base`, which keeps the settings of those of its parts that stay."""
    values: dict[str, Any] = {}
    kept: dict[str, object] = {}
    if base is not None:
        values = {name: getattr(base, name) for name in FIELDS}
        for slot, part in base.parts.items():
            if changes.get(slot, values[slot]) == values[slot]:
                kept |= {name: base.settings[name] for name in part.settings}
    values |= {key: value for key, value in changes.items() if key in FIELDS}
    where = f"algorithm {values['name']!r}: "
    known = dict(COMMON)
    for slot in SLOTS:
        known |= find_part(slot, values.get(slot, "none"), where=where).settings
    theirs = {name for slot in SLOTS for part in builtin_parts(slot).values() for name in part.settings}
    for key in changes:
        if key not in (words := [*FIELDS, *sorted(theirs | known.keys() - set(FIELDS))]):
            raise UserError(
                f"{where}unknown field {key!r}.{did_you_mean(key, words)} Known: {', '.join(words)}."
            )
    read = {key: known[key].read(value) if key in known else value for key, value in changes.items()}
    settings = kept | {key: value for key, value in read.items() if key not in FIELDS}
    return Recipe(**values | {key: value for key, value in read.items() if key in FIELDS}, settings=settings)


def _table() -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for row in _ROWS:
        base = recipes.get(str(row.get("base")))
        parts = {} if base else {"ratio": "token", "surrogate": "clip"}
        recipes[str(row["name"])] = _build(base, {**parts, **{k: v for k, v in row.items() if k != "base"}})
    return recipes


RECIPES: Mapping[str, Recipe] = MappingProxyType(_table())
