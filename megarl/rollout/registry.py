"""The engines, by the `kind` that a configuration names.

An engine is a folder or file with two things: a class derived from `EngineSettings` (pydantic, no torch), which holds
its settings and makes the engine, and the engine, which meets `megarl.rollout.engine.Engine`. megarl's own are rows of
`ENGINES`. Yours needs no row: name its settings class by import path,

    engine: {kind: my_package.my_engine:MySettings, my_option: 3}

and hold it against `tests/rollout/test_engine_contract.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

from pydantic import SerializeAsAny, ValidationError

from megarl.errors import UserError, did_you_mean
from megarl.rollout.declaration import EngineSettings
from megarl.rollout.embedded.settings import EmbeddedSettings
from megarl.rollout.sglang.settings import SGLangSettings

ENGINES: tuple[type[EngineSettings], ...] = (EmbeddedSettings, SGLangSettings)

if TYPE_CHECKING:
    AnyEngineSettings = EngineSettings
else:
    AnyEngineSettings = SerializeAsAny[Union[ENGINES]]  # noqa: UP007


def is_own(kind: object) -> bool:
    """Tell whether this `kind` is the import path of a user's own engine."""
    return isinstance(kind, str) and ":" in kind


def find_engine(path: str) -> type[EngineSettings]:
    """Return the settings class at an import path, package.module:Class. Raises UserError where there is none."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever is wrong with a user's module
        raise UserError(
            f"engine.kind: cannot import {module_name!r} ({type(error).__name__}: {error})"
        ) from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, EngineSettings)):
        known = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise UserError(
            f"engine.kind: {module_name!r} has no class {name!r} derived from "
            f"megarl.rollout.declaration.EngineSettings.{did_you_mean(name, known)}"
        )
    return found


def read_own_engine(values: Mapping[str, Any]) -> EngineSettings:
    """Return the settings of a user's own engine. Raises UserError as `find_engine`, ValueError for a wrong setting."""
    settings = find_engine(values["kind"])
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{key}: {first['msg']}. Known there: {', '.join(settings.model_fields)}") from None
