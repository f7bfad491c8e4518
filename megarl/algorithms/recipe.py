"""A recipe: one objective as plain, frozen, checked data. The table of them is in `recipes.py`."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from megarl.algorithms.parts import REQUIRED, SLOTS, Part, Setting, builtin_parts, find_part, setting_of
from megarl.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """One objective: a part for each slot of `parts.SLOTS`, by name or import path, and settings.

    settings: those of the parts picked; what is left out gets the part's default. Each is an attribute, too:
    `recipe.kl_coef` is `recipe.settings["kl_coef"]`, and AttributeError where no part has it. Every recipe has
    the other fields.

    Checked when made (also by `dataclasses.replace`): UserError for a part that cannot be found, a value out
    of range, a setting that no chosen part has, and a combination that a part or `RULES` refuses.
    """

    name: str
    advantage: str
    ratio: str
    surrogate: str
    weights: str
    kl: str = "none"
    correction: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    entropy_coef: Annotated[float, Setting("weight of the entropy bonus", at_least=0.0)] = 0.0
    off_policy_delta: Annotated[
        float | None,
        Setting(
            "leave out tokens with A < 0 of responses with mean(old - logp) above this many nats "
            "(DeepSeek-V3.2); null = keep all",
            above=0.0,
        ),
    ] = None
    old_logprobs: Annotated[
        Literal["auto", "current", "recompute", "engine"],
        Setting("where the old log-probabilities come from (auto: `resolve_sources`)"),
    ] = "auto"
    routing_replay: Annotated[
        Literal["auto", "off", "recorded", "engine"],
        Setting("which routes an MoE policy replays (auto: `resolve_sources`)"),
    ] = "auto"
    minibatches: Annotated[int, Setting("optimizer steps per rollout", at_least=1)] = 1
    dynamic_sampling: Annotated[bool, Setting("sample until groups differ in reward; drop the others")] = (
        False
    )
    title: str = ""
    description: str = ""
    source: str = ""
    parts: Mapping[str, Part] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"algorithm {self.name!r}: "
        parts = {slot: find_part(slot, getattr(self, slot), where=where) for slot in SLOTS}
        object.__setattr__(self, "parts", MappingProxyType(parts))
        object.__setattr__(self, "settings", MappingProxyType(_complete(self, where)))
        for name, setting in self.settings_in_use().items():
            setting.check(getattr(self, name), f"{where}{name}")
        for part in parts.values():
            for name, reasons in part.refused.items():
                if reason := reasons.get(getattr(self, name, None)):
                    raise UserError(where + reason)
        for rule in RULES:
            if rule.broken(self):
                raise UserError(where + rule.reason)

    def __getattr__(self, name: str) -> Any:
        """A setting of the parts picked."""
        settings = self.__dict__.get("settings", {})
        if name not in settings:
            raise AttributeError(f"recipe {self.__dict__.get('name')!r} has no setting {name!r}")
        return settings[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled recipe names its parts: they are found again where it is read."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return functools.partial(Recipe, **(values | {"settings": dict(self.settings)})), ()

    def use(self, slot: str) -> Callable[[Any], Any]:
        """Return the function of the part picked for a slot, with its settings filled in."""
        part = self.parts[slot]
        return functools.partial(part.function, **{name: self.settings[name] for name in part.arguments})

    def settings_in_use(self) -> dict[str, Setting]:
        """Return the settings that its parts have, slot by slot, then those of every recipe."""
        own = {name: s for part in self.parts.values() for name, s in part.settings.items()}
        return {**own, **COMMON}

    @property
    def needs(self) -> frozenset[str]:
        """What the training step provides beside the log-probabilities of now; some of `parts.NEEDS`.

        "engine_logprobs", "ref_logprobs", "values": columns, the last a critic's. "greedy_rewards": the reward
        of one greedy response to each prompt. "old_logprobs" only where advantages need the trainer's pass over
        the rollout itself, for a KL in the reward; otherwise `resolve_sources` says where they come from.
        """
        needs = frozenset().union(*(part.needs for part in self.parts.values()))
        return needs | {"old_logprobs"} if self.has_reward_kl else needs

    @property
    def compares_group(self) -> bool:
        """A response's baseline is its group: one alone has advantage 0."""
        return self.parts["advantage"].compares_group

    @property
    def has_reward_kl(self) -> bool:
        """The KL is taken from the reward, so advantages wait for the old and the reference pass."""
        return self.kl != "none" and self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_token_advantages(self) -> bool:
        """Advantages differ from token to token."""
        part = self.parts["advantage"]
        return part.per_token or (part.kl_to_go and self.has_reward_kl)


class Rule(NamedTuple):
    """A combination that is refused, and why. It speaks of what parts declare, not of their names."""

    broken: Callable[[Recipe], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        lambda r: (
            (r.parts["ratio"].per_response or r.parts["surrogate"].per_response)
            and not r.parts["weights"].per_response
        ),
        "all tokens of a response have one ratio or one loss, so these weights would weigh a response by its "
        "length: set weights: sequence_mean",
    ),
    Rule(
        lambda r: r.parts["surrogate"].token_ratio and r.parts["ratio"].per_response,
        "this surrogate treats each token by its own ratio: set ratio: token",
    ),
    Rule(
        lambda r: r.parts["ratio"].one_advantage and r.has_token_advantages,
        "a sequence ratio has one advantage per response, this advantage differs from token to token: "
        "set ratio: sequence_token",
    ),
    Rule(
        lambda r: r.settings.get("correction_low", 0.0) >= r.settings.get("correction_high", math.inf),
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

FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Recipe) if f.init and f.name != "settings")

_HINTS = typing.get_type_hints(Recipe, include_extras=True)

# the settings that every recipe has
COMMON: Mapping[str, Setting] = MappingProxyType(
    {
        f.name: setting_of(f.name, _HINTS[f.name], f.default)
        for f in fields(Recipe)
        if any(isinstance(extra, Setting) for extra in typing.get_args(_HINTS[f.name]))
    }
)


def _complete(recipe: Recipe, where: str) -> dict[str, Any]:
    """The settings of the parts, with defaults. UserError for one that no part has, that two have, or a missing one."""
    owners: dict[str, str] = dict.fromkeys(FIELDS, "every recipe")
    complete = {}
    for slot, part in recipe.parts.items():
        for name, setting in part.settings.items():
            if name in owners:
                raise UserError(
                    f"{where}{slot} {part.name!r} has a setting {name!r}, and so has {owners[name]}: rename it"
                )
            owners[name] = f"{slot} {part.name!r}"
            complete[name] = recipe.settings.get(name, setting.default)
            if complete[name] is REQUIRED:
                raise UserError(f"{where}{slot} {part.name!r} needs the setting {name!r}")
    for name, value in recipe.settings.items():
        if name not in complete:
            raise _without_effect(recipe, name, value, where)
    return complete


def _without_effect(recipe: Recipe, name: str, value: object, where: str) -> UserError:
    for slot in SLOTS:
        having = [part.name for part in builtin_parts(slot).values() if name in part.settings]
        if having:
            return UserError(
                f"{where}{name} = {value!r} has no effect with {slot} {getattr(recipe, slot)!r} "
                f"(only with {', '.join(having)}): take it out or change {slot}"
            )
    return UserError(f"{where}{name} = {value!r} has no effect: no part has such a setting")


class LogprobAndRouteSource(NamedTuple):
    """Which passes a step runs: current | recompute | engine, and off | recorded | engine."""

    old_logprobs: str
    routing_replay: str


def resolve_sources(recipe: Recipe, *, moe: bool, minibatches: int | None = None) -> LogprobAndRouteSource:
    """Return what the recipe's `auto` comes to for this model and number of mini-batches (None: the recipe's own).

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
    return LogprobAndRouteSource(old, replay)
