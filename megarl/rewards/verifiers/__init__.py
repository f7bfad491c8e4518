"""The built-in verifiers, one a file, and the registry that finds a verifier by its name or import path.

A file or folder of this package holds exactly one verifier and has its name: `verifier: math` means the function
in `math/` that `@verifier` marks. So a new verifier is one new file here, and nothing else. What verifiers share
lies above, in `megarl/rewards/`. A verifier is imported only when it is asked for: a worker process loads only
what it scores with.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NotRequired, Required

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megarl.errors import UserError, did_you_mean
from megarl.rewards.contract import GroundTruth, RunIn, VerifierSpec


@dataclass(frozen=True)
class Verifier:
    """A verifier found by `find`: its name, its import path, the function or class, and its declaration."""

    name: str
    path: str
    function: Callable[..., Any]
    spec: VerifierSpec

    def run_in(self, ground_truth: GroundTruth) -> RunIn:
        """Return where a response to this ground truth is scored."""
        chosen = self.spec.run_in
        return chosen(ground_truth) if callable(chosen) else chosen

    def options(self, given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """Return `given` checked against the function's keyword-only parameters.

        where: begins an error's message. Raises UserError for an unknown, missing or wrong option.
        """
        names, adapter = _options_of(self.function)
        try:
            options = adapter.validate_python(dict(given))
        except ValidationError as error:
            raise UserError(f"{where}: {_explain(error, names, self.name)}") from None
        if self.spec.check is not None:
            try:
                self.spec.check(**options)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        return options


def builtin_names() -> list[str]:
    """Return the names of the built-in verifiers, sorted; imports none of them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str, *, where: str = "verifier") -> Verifier:
    """Return the verifier of this name, or at this import path (`package.module:function`).

    where: begins an error's message.
    Raises UserError for an unknown name, a module that cannot be imported, or something that is no verifier.
    """
    builtin, known = ":" not in name, builtin_names()
    if builtin and name not in known:
        raise UserError(
            f"{where}: no verifier is named {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}; "
            "your own is named by its import path, package.module:function"
        )
    module_name, _, attribute = (f"{__name__}.{name}" if builtin else name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever is wrong with a user's module
        raise UserError(
            f"{where}: verifier {name!r}: cannot import {module_name!r} ({type(error).__name__}: {error})"
        ) from error
    attribute = _declared_in(module) if builtin else attribute
    function = getattr(module, attribute, None)
    if not callable(function):
        others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"{where}: verifier {name!r}: {module_name!r} has no function {attribute!r}."
            f"{did_you_mean(attribute, others)}"
        )
    _check_signature(function, f"{where}: verifier {name!r}")
    declared = getattr(function, "spec", None)
    spec = declared if isinstance(declared, VerifierSpec) else VerifierSpec()
    return Verifier(name, f"{module_name}:{attribute}", function, spec)


def _declared_in(module: ModuleType) -> str:
    """Return the name of the one verifier that a file of this package declares."""
    found = [
        name
        for name, value in vars(module).items()
        if isinstance(getattr(value, "spec", None), VerifierSpec) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must declare one verifier by @verifier, it has {found}")
    return found[0]


def _check_signature(function: Callable[..., Any], where: str) -> None:
    """Refuse a function that cannot be called with a response and a ground truth."""
    if inspect.isclass(function):
        return
    try:
        inspect.signature(function).bind_partial(None, None)
    except (TypeError, ValueError):
        raise UserError(
            f"{where} cannot be called: it must take (response, ground_truth, *, options...)"
        ) from None


def _options_of(function: Callable[..., Any]) -> tuple[list[str], TypeAdapter[dict[str, Any]]]:
    """Return the names and the types of the keyword-only parameters (of `__init__`, for a class)."""
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
    """Return one sentence a user can act on: an unknown option first, it may be the missing one misspelt."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(key, known)
        return f"verifier {name!r} has no option {key!r}.{hint} Its options: {', '.join(known) or 'none'}"
    if first["type"] == "missing":
        return f"verifier {name!r} needs the option {key!r}"
    return f"verifier {name!r}, option {key!r}: {first['msg'].removeprefix('Value error, ')} (got {first['input']!r})"
