"""A recipe: one objective as plain, frozen, checked data. The table of them is in `recipes.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from megarl.algorithms.parts import PARTS, SETTINGS, Setting, owners
from megarl.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Recipe:
    """One objective. Slots name a part of `PARTS`, the rest are `SETTINGS`; a default here means "not in
    use".

    Checked when made (also by `dataclasses.replace`): UserError for an unknown part, a value out of range, a
    setting that no chosen part reads, and a combination that `RULES` refuses. `get_recipe` and `make_recipe`
    fill in the defaults of the parts.
    """

    name: str
    advantage: str
    ratio: str
    surrogate: str
    weights: str
    kl: str = "none"
    correction: str = "none"
    std: str = "none"
    gamma: float | None = None
    gae_lambda: float | None = None
    value_clip: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    kl_coef: float = 0.0
    kl_in: str = "loss"
    correction_low: float | None = None
    correction_high: float | None = None
    off_policy_delta: float | None = None
    entropy_coef: float = 0.0
    old_logprobs: str = "auto"
    routing_replay: str = "auto"
    minibatches: int = 1
    dynamic_sampling: bool = False
    title: str = ""
    description: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for slot, parts in PARTS.items():
            if getattr(self, slot) not in list(parts):
                raise _unknown(self, slot)
        for setting in SETTINGS:
            _check_setting(self, setting)
        for rule in RULES:
            if rule.broken(self):
                raise UserError(f"algorithm {self.name!r}: {rule.reason}")

    @property
    def needs(self) -> frozenset[str]:
        found = {
            "ref_logprobs": self.kl != "none",
            "values": self.needs_critic,
            "greedy_rewards": self.needs_greedy,
            "engine_logprobs": self.needs_engine_logprobs,
            "old_logprobs": self.has_reward_kl,
        }
        return frozenset(name for name, needed in found.items() if needed)

    @property
    def needs_reference(self) -> bool:
        """A pass of the reference policy is needed."""
        return self.kl != "none"

    @property
    def needs_critic(self) -> bool:
        """Advantages need a critic's values."""
        return self.advantage == "gae"

    @property
    def needs_greedy(self) -> bool:
        """Each prompt needs one greedy response, for its reward."""
        return self.advantage == "remax"

    @property
    def compares_group(self) -> bool:
        """A response's baseline is its group: one alone has advantage 0."""
        return self.advantage not in ("reinforce_pp", "remax", "gae")

    @property
    def needs_lengths(self) -> bool:
        """`compute_advantages` needs the active tokens of each response."""
        return self.advantage in ("opo", "reinforce_pp", "reinforce_pp_baseline")

    @property
    def needs_engine_logprobs(self) -> bool:
        """`policy_loss` needs the engine's log-probabilities beside the old ones."""
        return self.correction != "none"

    @property
    def has_reward_kl(self) -> bool:
        """The KL is taken from the reward, so advantages wait for the old and the reference pass."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_late_advantages(self) -> bool:
        """`token_advantages` makes the advantages, after those passes; else `compute_advantages` does, at once."""
        return self.needs_critic or self.has_reward_kl

    @property
    def has_token_advantages(self) -> bool:
        """Advantages differ from token to token."""
        return self.advantage == "gae" or (self.advantage == "reinforce_pp" and self.has_reward_kl)


class Rule(NamedTuple):
    """A combination that is refused, and why."""

    broken: Callable[[Recipe], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        lambda r: r.ratio != "token" and r.weights != "sequence_mean",
        "a sequence ratio is the same for all tokens of a response, so these weights would weigh a response "
        "by its length: set weights: sequence_mean",
    ),
    Rule(
        lambda r: r.surrogate == "gmpo" and r.weights != "sequence_mean",
        "gmpo takes one geometric mean per response, which other weights would weigh by its length: "
        "set weights: sequence_mean",
    ),
    Rule(
        lambda r: r.surrogate in ("gmpo", "sapo") and r.ratio != "token",
        "gmpo and sapo treat each token by its own ratio: set ratio: token",
    ),
    Rule(
        lambda r: r.ratio == "sequence" and r.has_token_advantages,
        "a sequence ratio has one advantage per response, this advantage differs from token to token: "
        "set ratio: sequence_token",
    ),
    Rule(
        lambda r: r.surrogate != "gmpo" and (r.clip_low or 0.0) > 1.0,
        "clip_low is at most 1: the lower bound 1 - clip_low of a ratio cannot be negative",
    ),
    Rule(
        lambda r: r.kl == "k1" and r.kl_in == "loss",
        "as a loss, k1's gradient is zero on average and constrains nothing: use k2 or k3+, or set kl_in: "
        "reward",
    ),
    Rule(
        lambda r: r.kl == "k3+" and r.kl_in == "reward",
        "k3+ is about the gradient, and a reward has none: use k1 or k3 with kl_in: reward",
    ),
    Rule(
        lambda r: (r.correction_low or 0.0) >= (r.correction_high or math.inf),
        "correction_low must lie below correction_high",
    ),
    Rule(
        lambda r: r.correction != "none" and r.old_logprobs == "engine",
        "a correction weighs the trainer's old log-probabilities against the engine's, but old_logprobs: "
        "engine makes them the same numbers: set correction: none, or old_logprobs: recompute",
    ),
    Rule(
        lambda r: r.routing_replay == "recorded" and r.old_logprobs in ("engine", "current"),
        "routing_replay: recorded takes its routes from the recompute pass, which old_logprobs: engine and "
        "current leave out: set old_logprobs: recompute, or routing_replay: engine",
    ),
    Rule(
        lambda r: r.old_logprobs == "current" and r.minibatches > 1,
        "old_logprobs: current makes every ratio 1, also after the policy has moved: with several "
        "mini-batches use recompute or engine",
    ),
)


class Sources(NamedTuple):
    """Which passes a step runs. old_logprobs: current | recompute | engine. routing_replay: off | recorded |
    engine."""

    old_logprobs: str
    routing_replay: str


def resolve_sources(recipe: Recipe, *, moe: bool, minibatches: int | None = None) -> Sources:
    """What the recipe's `auto` comes to for this model and number of mini-batches (None: the recipe's own).

    old_logprobs auto: `current` with one mini-batch (the policy that is updated is the one that sampled),
    else `recompute`. routing_replay auto: `recorded` for an MoE with several mini-batches and a recompute
    pass to record in, else `off`. An explicit word is kept; `recorded` asks for the recompute pass. Raises
    UserError where that is a combination the rules refuse, and for replay on a dense model.
    """
    count = recipe.minibatches if minibatches is None else minibatches
    old, replay = recipe.old_logprobs, recipe.routing_replay
    if old == "auto":
        old = "recompute" if count > 1 or replay == "recorded" else "current"
    if replay == "auto":
        replay = "recorded" if moe and count > 1 and old == "recompute" else "off"
    if replay != "off" and not moe:
        raise UserError(
            f"algorithm {recipe.name!r}: routing_replay: {replay} needs a Mixture-of-Experts model, this one "
            "is dense: set routing_replay: off"
        )
    replace(recipe, old_logprobs=old, routing_replay=replay, minibatches=count)
    return Sources(old, replay)


def _unknown(recipe: Recipe, slot: str) -> UserError:
    value, known = getattr(recipe, slot), PARTS[slot]
    return UserError(
        f"algorithm {recipe.name!r}: unknown {slot} {value!r}.{did_you_mean(str(value), known)} "
        f"Known: {', '.join(known)}."
    )


def _check_setting(recipe: Recipe, name: str) -> None:
    setting, value, owner = SETTINGS[name], getattr(recipe, name), owners(name)
    where = f"algorithm {recipe.name!r}: {name}"
    if owner is not None and getattr(recipe, owner[0]) not in owner[1]:
        if value != Recipe.__dataclass_fields__[name].default:
            slot, parts = owner
            raise UserError(
                f"{where} = {value!r} has no effect with {slot} {getattr(recipe, slot)!r} "
                f"(only with {', '.join(parts)}): take it out or change {slot}"
            )
        return
    if value is None and setting.optional:
        return
    if isinstance(setting.kind, tuple):
        if value not in setting.kind:
            hint = did_you_mean(str(value), setting.kind)
            raise UserError(f"{where} is {value!r}, it must be one of {', '.join(setting.kind)}.{hint}")
        return
    words, types = KINDS[setting.kind]
    if not isinstance(value, types) or isinstance(value, bool) != (setting.kind is bool):
        raise UserError(f"{where} is {value!r}, it must be {words}")
    number = cast(float, value)
    if not (setting.above < number and setting.at_least <= number <= setting.at_most):
        raise UserError(f"{where} is {value!r}, it must be {_range(setting)}")


KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    float: ("a number", (int, float)),
    int: ("a whole number", (int,)),
    bool: ("true or false", (bool,)),
}


def _range(setting: Setting) -> str:
    low = f"above {setting.above:g}" if setting.above > setting.at_least else f"at least {setting.at_least:g}"
    return low if setting.at_most == math.inf else f"{low} and at most {setting.at_most:g}"
