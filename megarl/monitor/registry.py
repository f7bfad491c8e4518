"""What a metric is, and the registry that knows them all. The rows themselves are in `metrics.py`.

A name that is not in the registry cannot be logged: a typo would otherwise become a second, silent curve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megarl.errors import did_you_mean

REDUCTIONS: Mapping[str, str] = {
    "token_mean": "mean over the active tokens of the global batch, each counted once",
    "response_mean": "mean over the responses of the global batch",
    "group_mean": "mean over the groups (prompts) of the global batch",
    "mean": "mean over the optimizer steps or calls of this step",
    "sum": "sum over ranks and micro-batches",
    "max": "largest over ranks and micro-batches",
    "min": "smallest over ranks and micro-batches",
    "quantile": "quantile over the responses of the global batch",
    "same": "equal on every rank, taken as it is",
}


class UnregisteredMetric(ValueError):
    """Something logged a name that the registry does not hold: a mistake in code, not in a user's input."""


@dataclass(frozen=True)
class MetricSpec:
    """One number megarl can log.

    name: `room/what`; `{part}` stands for one path element that only the run knows (a data set, a reason).
    meaning: one sentence, with the formula or source where there is one.
    unit: what 1.0 means ("tokens", "s", "share" = between 0 and 1, "nats").
    healthy: the range a well-going run stays in and what leaving it means, in words; empty if there is none.
    reduction: how one number is made of many (`REDUCTIONS`). Values arrive at the sinks already reduced.
    console: its short name in the console line; None keeps it out.
    timing: it measures time or memory, so two otherwise identical runs differ in it.
    """

    name: str
    meaning: str
    unit: str
    healthy: str = ""
    reduction: str = "same"
    console: str | None = None
    timing: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(/([a-z0-9_]+|\{[a-z_]+\}))+", self.name):
            raise ValueError(
                f"metric {self.name!r}: names are lower-case path elements, such as 'train/pg_loss'"
            )
        if not self.meaning or not self.unit:
            raise ValueError(f"metric {self.name!r} needs a meaning and a unit")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"metric {self.name!r}: unknown reduction {self.reduction!r}")


class Registry:
    """Looks metrics up by name. Immutable; two rows of one name are refused.

    Iteration is in the order of the rows, which is also the order of the console line and of the docs.
    """

    def __init__(self, metrics: Iterable[MetricSpec]) -> None:
        self._exact: dict[str, MetricSpec] = {}
        patterns: list[tuple[re.Pattern[str], MetricSpec]] = []
        for metric in metrics:
            if metric.name in self._exact:
                raise ValueError(f"metric {metric.name!r} is registered twice")
            self._exact[metric.name] = metric
            if "{" in metric.name:
                patterns.append(
                    (re.compile(re.sub(r"\{[a-z_]+\}", r"[A-Za-z0-9_.\\-]+", metric.name)), metric)
                )
        self._patterns = tuple(patterns)

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._exact.values())

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __getitem__(self, name: str) -> MetricSpec:
        """The row of this name. Raises UnregisteredMetric, with the nearest known names."""
        metric = self._find(name)
        if metric is None:
            raise UnregisteredMetric(
                f"metric {name!r} is not registered, so it was not logged.{did_you_mean(name, self._exact)} "
                "A new metric needs a row in megarl/monitor/metrics.py."
            )
        return metric

    def place(self, name: str) -> int:
        """Return where the row of this name stands; after all others for a name that is not registered."""
        metric = self._find(name)
        return len(self._exact) if metric is None else list(self._exact).index(metric.name)

    def _find(self, name: str) -> MetricSpec | None:
        if "{" not in name and name in self._exact:
            return self._exact[name]
        return next((metric for pattern, metric in self._patterns if pattern.fullmatch(name)), None)
