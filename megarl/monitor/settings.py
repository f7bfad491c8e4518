"""Settings of the monitor room: where metrics go, and which of their values warn or stop a run."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from megarl.settings import Section

SinkName = Literal["jsonl", "console", "tensorboard", "wandb"]


class LogSettings(Section):
    """Where the numbers go."""

    sinks: tuple[SinkName, ...] = Field(
        default=("jsonl", "console"), description="Sinks of the metrics; jsonl is the record of the run."
    )
    project: str | None = Field(
        default=None, description="Name of the W&B project; None = WANDB_PROJECT, else megarl."
    )
    samples_every: int = Field(
        default=10, ge=0, description="RL steps between two files of samples; 0 = none."
    )


class AlarmRule(Section):
    """A value of a metric that warns, or stops the run."""

    metric: str = Field(description="Name of a metric, see docs/metrics.md.")
    when: Literal["above", "below", "not_finite"] = Field(description="Which values are wrong.")
    threshold: float | None = Field(
        default=None, description="Bound for `above` and `below`; `not_finite` takes none."
    )
    action: Literal["warn", "stop"] = Field(default="warn", description="Warn, or stop the run as well.")
    patience: int = Field(default=1, ge=1, description="Alarm after this many wrong values in a row.")
    advice: str = Field(default="", description="What to do then: a sentence that ends the alarm's message.")

    @model_validator(mode="after")
    def _threshold(self) -> AlarmRule:
        if (self.threshold is None) != (self.when == "not_finite"):
            raise ValueError("'above' and 'below' need a threshold, 'not_finite' takes none")
        return self

    def holds(self, value: float) -> bool:
        """Return whether this value is wrong. NaN is neither above nor below anything."""
        if self.threshold is None:
            return not math.isfinite(value)
        return value > self.threshold if self.when == "above" else value < self.threshold

    def key(self) -> str:
        """Return the condition, without what is done about it: rules that share it count the same steps."""
        return f"{self.metric} {self.when} {self.threshold}"


class AlarmSettings(Section):
    """When a run warns or stops by itself."""

    defaults: bool = Field(
        default=True, description="Apply megarl's own rules (megarl/monitor/alarms.py) as well."
    )
    rules: tuple[AlarmRule, ...] = Field(default=(), description="Further rules.")
