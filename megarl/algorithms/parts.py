"""What a part is, and how it is found by name.

A recipe picks one part for each slot of `SLOTS`. A part is one declaration: a function with its formula, its
meaning, its settings and what it needs.

    @part("surrogate", formula="l_t = -A tanh(softness (r_t - 1)) / softness", meaning="saturates smoothly")
    def soft_clip(
        tokens: Tokens,
        *,
        softness: Annotated[float, Setting("how early it saturates", above=0.0)] = 2.0,
    ) -> TokenLosses:
        return TokenLosses(-tokens.advantages * (softness * (tokens.ratio - 1.0)).tanh() / softness)

Its keyword-only parameters are its settings: float, int, bool or a `Literal` of words, each perhaps `| None`;
a `Setting` in the annotation says what it means and bounds it. A recipe without the part refuses its
settings, so no value is ever ignored in silence. Megarl's own parts are in the files that `SLOTS` names,
under the names of their functions; a user's own is named by its import path, `my_package.losses:soft_clip`.
Nothing has to be registered.

Symbols: r_t ratio, A advantage, R reward, G responses of a group, |y| active tokens of a response, sg() no
gradient. Losses are minimised.
"""

from __future__ import annotations

import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Union

from megarl.errors import UserError, did_you_mean

REQUIRED: Any = inspect.Parameter.empty
NEEDS = frozenset({"old_logprobs", "engine_logprobs", "ref_logprobs", "values", "greedy_rewards"})


@dataclass(frozen=True)
class Setting:
    """A value of a recipe: what it means and what it may be.

    above, at_least, at_most: bounds of a number. The rest is read off the annotated parameter or field:
    kind: float, int, bool, or the tuple of words to choose from. optional: None is a choice of its own.
    default: `REQUIRED` where there is none.
    """

    meaning: str = ""
    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf
    kind: type | tuple[str, ...] = float
    optional: bool = False
    default: Any = REQUIRED

    def read(self, value: Any) -> Any:
        """Return what YAML 1.1 parsers make something else of: `3e-4` (a string to them) and `off` (false)."""
        if value is False and isinstance(self.kind, tuple) and "off" in self.kind:
            return "off"
        if isinstance(value, str) and self.kind is float:
            try:
                return float(value)
            except ValueError:
                return value
        return value

    def check(self, value: Any, where: str) -> None:
        """Raise UserError for a value that the setting cannot have. where: begins the message."""
        if value is None and self.optional:
            return
        if isinstance(self.kind, tuple):
            if value not in self.kind:
                hint = did_you_mean(str(value), self.kind)
                raise UserError(f"{where} is {value!r}, it must be one of {', '.join(self.kind)}.{hint}")
            return
        number: float = value
        words, accepted = KINDS[self.kind]
        if not isinstance(value, accepted) or isinstance(value, bool) != (self.kind is bool):
            raise UserError(f"{where} is {value!r}, it must be {words}")
        if not (self.above < number and self.at_least <= number <= self.at_most):
            raise UserError(f"{where} is {value!r}, it must be {self.bounds}")

    @property
    def bounds(self) -> str:
        """The bounds of a number in words, "" where there are none."""
        low = f"above {self.above:g}" if self.above > self.at_least else f"at least {self.at_least:g}"
        words = [low] if max(self.above, self.at_least) > -math.inf else []
        words += [f"at most {self.at_most:g}"] if self.at_most < math.inf else []
        return " and ".join(words)


KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    float: ("a number", (int, float)),
    int: ("a whole number", (int,)),
    bool: ("true or false", (bool,)),
}


@dataclass(frozen=True)
class Slot:
    """One choice that every recipe makes.

    module: where megarl's own parts for it are.
    needs, settings: what each of its parts has beside its own; those settings are read by the training step.
    """

    module: str
    needs: frozenset[str] = frozenset()
    settings: Mapping[str, Setting] = field(default_factory=dict)


SLOTS: Mapping[str, Slot] = {  # with what a part's function takes and returns
    # Rewards -> float64 [responses]; with per_token, TokenRewards -> float64 [scored active tokens]
    "advantage": Slot("megarl.algorithms.advantages"),
    # LogRatios -> float32 [tokens], with the policy's gradient
    "ratio": Slot("megarl.algorithms.ratios"),
    # Tokens -> TokenLosses, with the policy's gradient
    "surrogate": Slot("megarl.algorithms.surrogates"),
    # Totals -> number, or [responses]: a token of the response has one over it as its weight
    "weights": Slot("megarl.algorithms.weights"),
    # float32 [tokens], logp - ref -> KLEstimate
    "kl": Slot(
        "megarl.algorithms.kl",
        needs=frozenset({"ref_logprobs"}),
        settings={
            "kl_coef": Setting(
                "weight of the KL to the reference policy; 0 = only measured", at_least=0.0, default=0.001
            ),
            "kl_in": Setting("where the KL acts", kind=("loss", "reward"), default="loss"),
        },
    ),
    # Mismatch -> Correction, without gradient
    "correction": Slot("megarl.algorithms.corrections", needs=frozenset({"engine_logprobs"})),
}

# read by `value_loss`: every part that needs a critic's values has it
CRITIC_SETTINGS: Mapping[str, Setting] = {
    "value_clip": Setting(
        "how far the critic's value may move from the old one; null = not clipped",
        above=0.0,
        optional=True,
        default=0.2,
    ),
}


@dataclass(frozen=True, eq=False)
class Part:
    """One choice for a slot, made by `part`.

    function: of one argument (see `SLOTS`) and the settings named in `arguments`.
    settings: its own, its slot's and, where it needs values, the critic's.
    needs: some of `NEEDS`, which the training step provides beside the log-probabilities of now.
    refused: by setting or slot, values that make no sense with this part, with the reason.

    For an advantage:
    compares_group: its baseline is the response's group. Where all rewards of a group are exactly equal, so
        also where it is of one, the advantage is exactly 0.
    whitened: brought to mean 0 and spread 1 over the active tokens of the whole rollout.
    per_token: it gives one advantage for each token rather than one for each response.
    kl_to_go: a KL in the reward is added up from each token on, rather than taken from the response's reward.

    For a ratio, a surrogate or weights:
    per_response: all tokens of a response have one ratio, one loss; all responses have the same weight.
    token_ratio: a surrogate that treats each token by its own ratio.
    one_advantage: a ratio for one advantage per response.
    """

    slot: str
    name: str
    formula: str
    meaning: str
    function: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    refused: Mapping[str, Mapping[object, str]] = field(default_factory=dict)
    compares_group: bool = False
    whitened: bool = False
    per_token: bool = False
    kl_to_go: bool = False
    per_response: bool = False
    token_ratio: bool = False
    one_advantage: bool = False

    def __call__(self, given: Any, **settings: Any) -> Any:
        """Call the function, which has defaults of its own for its settings."""
        return self.function(given, **settings)


def part(
    slot: str,
    *,
    formula: str,
    meaning: str,
    name: str | None = None,
    needs: Iterable[str] = (),
    defaults: Mapping[str, object] | None = None,
    refused: Mapping[str, Mapping[object, str]] | None = None,
    **traits: bool,
) -> Callable[[Callable[..., Any]], Part]:
    """Declare a function as a part for a slot; see `Part` for needs, refused and traits.

    formula: one line, as the function computes it. meaning: what it is good for, in a few words.
    name: the function's own, unless given. defaults: of the slot's settings, where this part has others.
    Raises ValueError and TypeError for a declaration that cannot be.
    """
    if slot not in SLOTS:
        raise ValueError(f"unknown slot {slot!r}. Known: {', '.join(SLOTS)}")

    def declare(function: Callable[..., Any]) -> Part:
        called = name or function.__name__
        if unknown := frozenset(needs) - NEEDS:
            raise ValueError(f"{called}: unknown need {min(unknown)!r}. Known: {', '.join(sorted(NEEDS))}")
        own = settings_of_function(function)
        shared = dict(SLOTS[slot].settings)
        for key, value in (defaults or {}).items():
            shared[key] = replace(shared[key], default=value)
        if "values" in needs:
            shared |= CRITIC_SETTINGS
        return Part(
            slot,
            called,
            formula,
            meaning,
            function,
            arguments=tuple(own),
            settings=own | shared,
            needs=SLOTS[slot].needs | frozenset(needs),
            refused=refused or {},
            **traits,
        )

    return declare


def absent(slot: str, meaning: str) -> Part:
    """Return the part `none` of a slot that a recipe may leave empty; it is never called."""

    def function(given: Any) -> None:
        raise AssertionError(f"{slot}: none has nothing to compute")

    return Part(slot, "none", formula="", meaning=meaning, function=function)


def settings_of_function(function: Callable[..., Any]) -> dict[str, Setting]:
    """Return the keyword-only parameters as settings. TypeError unless there is one more, and that alone."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    others = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if len(others) != 1 or others[0].kind in (others[0].VAR_POSITIONAL, others[0].VAR_KEYWORD):
        raise TypeError(f"{function.__name__}: a part's function takes one argument, and settings by keyword")
    return {p.name: setting_of(p.name, hints.get(p.name), p.default) for p in keywords}


def setting_of(name: str, annotation: Any, default: Any) -> Setting:
    """Return the setting that an annotated parameter or field is. TypeError for a type it cannot have."""
    declared = Setting()
    if typing.get_origin(annotation) is Annotated:
        annotation, *extras = typing.get_args(annotation)
        declared = next((extra for extra in extras if isinstance(extra, Setting)), declared)
    kinds = [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        declared = replace(declared, optional=len(kinds) < len(typing.get_args(annotation)))
    kind: Any = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is Literal else kinds[0]
    if len(kinds) != 1 or not (isinstance(kind, tuple) or kind in KINDS):
        raise TypeError(f"setting {name!r}: its type must be float, int, bool or a Literal, not {annotation}")
    return replace(declared, kind=kind, default=default)


def builtin_parts(slot: str) -> dict[str, Part]:
    """Return megarl's own parts for a slot by name, in the order of their file."""
    module = importlib.import_module(SLOTS[slot].module)
    return {p.name: p for p in vars(module).values() if isinstance(p, Part) and p.slot == slot}


def find_part(slot: str, name: object, *, where: str = "") -> Part:
    """Return the part of this name, or at this import path (`package.module:name`).

    where: begins the message ("algorithm 'mine': "). Raises UserError for an unknown name, a module that
    cannot be imported, something that is no part, and a part for another slot.
    """
    known = builtin_parts(slot)
    if isinstance(name, str) and name in known:
        return known[name]
    if not isinstance(name, str) or ":" not in name:
        raise UserError(
            f"{where}unknown {slot} {name!r}.{did_you_mean(str(name), known)} Known: {', '.join(known)}; "
            "your own is named by its import path, package.module:name."
        )
    found = load_part(name, where=where)
    if found.slot != slot:
        raise UserError(f"{where}{slot} {name!r} is declared for the slot {found.slot!r}: name it there")
    return found


def load_part(path: str, *, where: str = "") -> Part:
    """Return the part at an import path. Raises UserError as `find_part` does."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever is wrong with a user's module
        raise UserError(
            f"{where}{path!r}: cannot import {module_name!r} ({type(error).__name__}: {error})"
        ) from error
    parts = [key for key, value in vars(module).items() if isinstance(value, Part)]
    found = getattr(module, attribute, None)
    if found is None:
        raise UserError(
            f"{where}{path!r}: {module_name!r} has no part {attribute!r}.{did_you_mean(attribute, parts)}"
        )
    if not isinstance(found, Part):
        raise UserError(
            f"{where}{path!r} is no part: declare the function with @megarl.algorithms.part(slot, formula=..., "
            "meaning=...)"
        )
    return found
