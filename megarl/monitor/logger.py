"""Where the numbers of a step go: one `log` call, every sink.

Only the rank that speaks holds a `MetricLogger`; the others hold a `NullLogger`. Values arrive already
reduced over
ranks: nothing here knows torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from megarl.monitor.console import ConsoleSink
from megarl.monitor.jsonl import JsonlSink
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import Registry
from megarl.monitor.settings import LogSettings, SinkName
from megarl.monitor.tensorboard_sink import TensorBoardSink
from megarl.monitor.wandb_sink import WandbSink
from megarl.records import StepStats

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step. Names are registered, values are Python floats, steps only go up."""

    def close(self) -> None:
        """Finish writing. Called once, also when the run fails."""


class Logger(Protocol):
    """What a stage logs to."""

    def log(self, stats: StepStats) -> None:
        """Hand the step's numbers to every sink. Raises UnregisteredMetric before any sink has seen them."""

    def close(self) -> None:
        """Close every sink. Idempotent."""


class NullLogger:
    """The logger of every rank but the one that speaks."""

    def log(self, stats: StepStats) -> None:
        pass

    def close(self) -> None:
        pass


class MetricLogger:
    """Checks the names, then hands the numbers to each sink in turn. The file comes first: it is the
    record."""

    def __init__(self, sinks: Sequence[Sink], registry: Registry) -> None:
        self._sinks, self._registry = tuple(sinks), registry
        self._closed = False

    def log(self, stats: StepStats) -> None:
        for name in stats.metrics:
            _ = self._registry[name]
        metrics = {name: float(value) for name, value in stats.metrics.items()}
        for sink in self._sinks:
            sink.log(stats.step, metrics)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for sink in self._sinks:
                sink.close()


def open_logger(
    run_folder: Path,
    settings: LogSettings,
    *,
    enabled: bool = True,
    resume_at: int | None = None,
    total_steps: int | None = None,
    run_name: str | None = None,
    run_config: Mapping[str, Any] | None = None,
    console: Console | None = None,
    registry: Registry | None = None,
) -> Logger:
    """Open the logger of a run.

    run_folder: where `metrics.jsonl`, TensorBoard events and the W&B run live.
    enabled: False on every rank but the one that speaks; gives a NullLogger.
    resume_at: the step a resumed run goes on with, None for a new run. What a killed run logged of that step
        and of later ones is replaced. Log a step before saving its checkpoint: then a run killed between the
        two logs the step again, and nothing is lost.
    run_config: the resolved configuration, for W&B.
    Raises UserError for an unwritable folder, or a sink whose library is missing.
    """
    if not enabled:
        return NullLogger()
    registry = registry or default_registry()
    makers: dict[SinkName, Callable[[], Sink]] = {
        "jsonl": lambda: JsonlSink(run_folder / METRICS_FILE, resume_at=resume_at),
        "console": lambda: ConsoleSink(registry, total_steps=total_steps, console=console),
        "tensorboard": lambda: TensorBoardSink(run_folder / "tensorboard", resume_at=resume_at),
        "wandb": lambda: WandbSink(
            run_folder, project=settings.project, run_name=run_name, run_config=run_config
        ),
    }
    return MetricLogger([makers[name]() for name in makers if name in settings.sinks], registry)
