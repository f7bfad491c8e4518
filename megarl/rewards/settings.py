"""The settings of a reward: which verifiers, with which options and weights, and how scores become one number.

    reward = clip( sum over parts of weight * score ),   unless a gate is shut: then `gate_value`

`verifiers` gives options and weights to the verifiers that prompts name (a prompt is scored by the one it
names); `shaping` lists parts that score every response, whatever its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from megarl.errors import UserError, did_you_mean
from megarl.settings import Section

Bounds = tuple[float, float]


def _ordered(bounds: Bounds | None) -> Bounds | None:
    if bounds and bounds[0] > bounds[1]:
        raise ValueError(f"{list(bounds)}: the lower bound is above the upper")
    return bounds


class Part(Section):
    """One verifier's share of the reward."""

    name: str = Field(
        description="The name in the logs; also the verifier's, unless `verifier` says otherwise."
    )
    verifier: str | None = Field(default=None, description="Registry name or import path; None = as `name`.")
    weight: float = Field(
        default=1.0, description="Factor of this score in the reward; 0 measures and logs it only."
    )
    options: Mapping[str, Any] = Field(default_factory=dict, description="The verifier's own options.")
    timeout_s: float | None = Field(
        default=None, gt=0, description="Time bound in seconds; None = the verifier's own."
    )
    gate: float | None = Field(
        default=None,
        description="A score below this shuts the gate: the reward is `gate_value`, other parts are not run.",
    )
    clip: Bounds | None = Field(default=None, description="Bounds of this score before it is weighted.")
    _clip_is_ordered = field_validator("clip")(_ordered)

    @property
    def verifier_name(self) -> str:
        return self.verifier or self.name


class RewardSettings(Section):
    """How responses are scored, and how the scores become one reward."""

    verifiers: tuple[Part, ...] = Field(
        (), description="Options and weights for the verifiers that prompts name."
    )
    shaping: tuple[Part, ...] = Field(
        default=(), description="Parts that score every response, whatever its prompt."
    )
    gate_value: float = Field(default=0.0, description="The reward when a gate is shut.")
    clip: Bounds | None = Field(default=None, description="Bounds of the reward.")
    _clip_is_ordered = field_validator("clip")(_ordered)
    soft_overlong: int | None = Field(
        default=None,
        gt=0,
        description="DAPO's soft overlong punishment: over the last so many tokens of sampling.max_new_tokens it "
        "falls from 0 to -1 and is added to the reward, after groups were chosen by the raw one; None = none.",
    )
    overlong_filtering: bool = Field(
        default=False,
        description="Truncated responses keep their reward in their group, but are not trained on (DAPO).",
    )
    workers: int = Field(
        2, ge=0, description="Processes that score; 0 runs everything inline, without a time bound."
    )
    worker_memory_gib: float | None = Field(
        4.0, gt=0, description="Address space of one worker in GiB; None = unlimited."
    )

    @model_validator(mode="after")
    def _consistent(self) -> RewardSettings:
        names = [part.name for part in (*self.verifiers, *self.shaping)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two parts are named {name!r}; give one of them another name and `verifier: {name}`"
                )
        return self

    @classmethod
    def parse(cls, given: RewardSettings | Mapping[str, Any] | None) -> RewardSettings:
        """Return the settings that a plain mapping gives. Raises UserError that names the key."""
        if isinstance(given, RewardSettings):
            return given
        try:
            return cls.model_validate(dict(given or {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            message = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                known = [*cls.model_fields, *Part.model_fields]
                message = f"unknown setting.{did_you_mean(str(first['loc'][-1]), known)}"
            raise UserError(f"{'.'.join(map(str, ('rewards', *first['loc'])))}: {message}") from None
