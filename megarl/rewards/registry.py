"""What a verifier is, and how it is found by name.

A verifier is a plain function: it reads one response and what it should be compared with, and returns a
score.

    @verifier(place="inline")
    def shouts(response: Response, reference: Reference, *, at_least: int = 1) -> float:
        return float(response.text.count("!") >= at_least)

Its keyword-only parameters are its options: they are checked against their annotations when a configuration
is read, so a misspelt option is an error before the first token is sampled. Users add a verifier by import
path (`my_rewards.shouting:shouts`), with or without the decorator; nothing has to be registered.

Where a verifier runs is part of its declaration:
- `inline`: in the caller's thread. For functions that cannot hang and cost well under a millisecond.
- `worker`: in a process of the pool, killed and replaced when it outlives its time bound. The default.
- `service`: a class, made once with the options, whose `async def __call__(response, reference)` waits for
  somebody else's computer; `async def aclose()` ends it.

This file imports neither torch nor any verifier: a worker process loads only what it scores with.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NotRequired, Required, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megarl.errors import UserError, did_you_mean

Reference = Mapping[str, Any]
Place = Literal["inline", "worker", "service"]

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TIMEOUT_S = 10.0
BAD_REFERENCE = "bad reference"  # how the reason of a `BadReference` begins

# Names a configuration or a prompt may use, and where the function lives. Imported only when asked for.
BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "code": "megarl.rewards.code:code",
        "exact": "megarl.rewards.exact:exact",
        "format": "megarl.rewards.format:format",
        "json_schema": "megarl.rewards.json_schema:json_schema",
        "language_consistency": "megarl.rewards.penalties:language_consistency",
        "length": "megarl.rewards.penalties:length",
        "math": "megarl.rewards.math:math",
        "model_judge": "megarl.rewards.judge:ModelJudge",
        "multiple_choice": "megarl.rewards.exact:multiple_choice",
        "reasoning_gym": "megarl.rewards.reasoning_gym:reasoning_gym",
        "regex": "megarl.rewards.regex:regex",
        "remote": "megarl.rewards.remote:Remote",
        "repetition": "megarl.rewards.penalties:repetition",
    }
)


@dataclass(frozen=True)
class Response:
    """What a verifier may know of a sample; small and picklable.

    text: the decoded response without special tokens.
    tokens: response tokens, None where unknown (a file of texts).
    finish_reason: "stop", "length" or "abort".
    prompt: the rendered prompt, "" where unknown.
    """

    text: str
    tokens: int | None = None
    finish_reason: str = "stop"
    prompt: str = ""


@dataclass(frozen=True)
class Score:
    """A verifier's verdict.

    value: the score, or None = could not be scored, which is never the same as 0.
    parts: the verifier's own sub-scores, logged as `<verifier>/<part>`: finite numbers, or None.
    reason: why value is None, or (for people) why it is what it is.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError("a Score without a value needs a reason")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a score must be finite, not {self.value!r}; use Score(None, reason=...)")
        for name, part in self.parts.items():
            if part is not None and not (isinstance(part, numbers.Real) and math.isfinite(part)):
                raise ValueError(
                    f"part {name!r} of a score must be a finite number or None, not {part!r:.60}"
                )


class BadReference(UserError):
    """The reference lacks what its verifier needs: a fault of the data's row, not of the response."""


@dataclass(frozen=True)
class Placement:
    """How `@verifier` says a function wants to be run."""

    place: Place | Callable[[Reference], Place] = "worker"
    timeout_s: float = DEFAULT_TIMEOUT_S
    check: Callable[..., None] | None = None
    warm: Callable[[], None] | None = None


def verifier(
    *,
    place: Place | Callable[[Reference], Place] = "worker",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    check: Callable[..., None] | None = None,
    warm: Callable[[], None] | None = None,
) -> Callable[[F], F]:
    """Declare where a verifier runs and its default time bound in seconds; the function stays a plain
    function.

    place: one place, or a function of the reference that names it (`reasoning_gym` knows tasks of both
        sorts).
    check: called with the options given when a configuration is read, before anything is sampled; raises
        UserError for what cannot work (contradictory options, a missing sandbox).
    warm: called once where worker processes are forked from, so that caches filled by it are every worker's.
    """

    def mark(function: F) -> F:
        function.placement = Placement(place, timeout_s, check, warm)  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Verifier:
    """A verifier found by `find`: its name, its import path, the function, and its declaration."""

    name: str
    path: str
    function: Callable[..., Any]
    placement: Placement

    def place(self, reference: Reference) -> Place:
        where = self.placement.place
        return where(reference) if callable(where) else where

    def options(self, given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """`given`, checked against the function's keyword-only parameters; `where` begins an error's
        message.
        """
        names, adapter = _options_of(self.function)
        try:
            options = adapter.validate_python(dict(given))
        except ValidationError as error:
            raise UserError(f"{where}: {_explain(error, names, self.name)}") from None
        if self.placement.check is not None:
            try:
                self.placement.check(**options)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        return options


def find(name: str, *, where: str = "verifier") -> Verifier:
    """The verifier of this name, or at this import path (`package.module:function`).

    Raises UserError for an unknown name, a module that cannot be imported, or something that is no verifier.
    """
    path = BUILTIN.get(name, name)
    if ":" not in path:
        raise UserError(
            f"{where}: no verifier is named {name!r}.{did_you_mean(name, BUILTIN)} "
            f"Known: {', '.join(sorted(BUILTIN))}; "
            "your own is named by its import path, package.module:function"
        )
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever is wrong with a user's module
        raise UserError(
            f"{where}: verifier {name!r}: cannot import {module_name!r} ({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"{where}: verifier {name!r}: {module_name!r} has no function {attribute!r}."
            f"{did_you_mean(attribute, known)}"
        )
    _check_signature(function, f"{where}: verifier {name!r}")
    return Verifier(name, path, function, getattr(function, "placement", Placement()))


def _check_signature(function: Callable[..., Any], where: str) -> None:
    """Refuse a function that cannot be called with a response and a reference."""
    if inspect.isclass(function):
        return
    try:
        inspect.signature(function).bind_partial(None, None)
    except (TypeError, ValueError):
        raise UserError(
            f"{where} cannot be called: it must take (response, reference, *, options...)"
        ) from None


def to_score(returned: Any) -> Score:
    """What a verifier returned, as a `Score`: numbers and booleans become values, anything odd is
    unscored.
    """
    if isinstance(returned, Score):
        return returned
    if isinstance(returned, (bool, int, float)) or hasattr(returned, "__float__"):
        try:
            value = float(returned)
        except (OverflowError, TypeError, ValueError) as error:
            return Score(None, reason=f"returned no number: {error}")
        if not math.isfinite(value):
            return Score(None, reason=f"returned {value}")
        return Score(value)
    return Score(None, reason=f"returned {type(returned).__name__}, expected a number or a Score")


def call(
    function: Callable[..., Any], response: Response, reference: Reference, options: Mapping[str, Any]
) -> Score:
    """Run a verifier in this thread. Whatever it raises makes the response unscored, with the reason."""
    try:
        return to_score(function(response, reference, **options))
    except (Exception, SystemExit) as error:
        return unscored(error)


def unscored(error: BaseException) -> Score:
    """What a verifier raised, as a `Score` without a value."""
    if isinstance(error, BadReference):
        return Score(None, reason=f"{BAD_REFERENCE}: {error}")
    return Score(None, reason=f"raised {type(error).__name__}: {str(error)[:200]}")


def _options_of(function: Callable[..., Any]) -> tuple[list[str], TypeAdapter[dict[str, Any]]]:
    """The names and the types of the keyword-only parameters (of `__init__`, for a class)."""
    target = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    hints = typing.get_type_hints(target, vars(sys.modules[target.__module__]), include_extras=True)
    fields: dict[str, Any] = {}
    extra: Literal["allow", "forbid"] = "forbid"
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            required = Required if parameter.default is parameter.empty else NotRequired
            fields[parameter.name] = required[hints.get(parameter.name, Any)]
    options = typing.cast(Any, TypedDict("options", fields))  # type: ignore[operator]
    options.__pydantic_config__ = ConfigDict(extra=extra, arbitrary_types_allowed=True)
    return sorted(fields), TypeAdapter(options)


def _explain(error: ValidationError, known: list[str], name: str) -> str:
    """One sentence a user can act on: an unknown option first, it may be the missing one misspelt."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(key, known)
        return f"verifier {name!r} has no option {key!r}.{hint} Its options: {', '.join(known) or 'none'}"
    if first["type"] == "missing":
        return f"verifier {name!r} needs the option {key!r}"
    return f"verifier {name!r}, option {key!r}: {first['msg']} (got {first['input']!r})"
