"""The base class of every settings section, and the type of a path, for the `settings.py` of each room. It imports
pydantic alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from megarl.errors import UserError


def expand_home(path: str) -> str:
    """Return a path with a leading `~` or `~user` as that home folder. Raises ValueError where there is none."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(
            f"{path!r}: there is no such home folder; write the whole path (./{path} for a name with a ~)"
        )
    return expanded


def user_path(path: str | Path, key: str = "") -> Path:
    """Return a path that a user gave, with `~` and `~user` as home folders. Raises UserError, which names the key."""
    try:
        return Path(expand_home(str(path)))
    except ValueError as error:
        raise UserError(f"{key + ': ' if key else ''}{error}") from error


HomePath = Annotated[str, AfterValidator(expand_home)]  # the type of every setting that is a path


class Section(BaseModel):
    """A frozen section of the configuration: unknown keys and numbers that are not finite are refused.

    Each field has a description: a sentence with its unit, which `megarl config explain` and docs/config.md show.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )
