"""The base class of every settings section, for the `settings.py` of each room. It imports only pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the configuration: unknown keys and numbers that are not finite are refused.

    Each field has a description: a sentence with its unit, which `megarl config explain` and docs/config.md show.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )
