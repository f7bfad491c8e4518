"""Where the numbers of a step go: one `log` call, every sink.

Only the rank that speaks has sinks. Values arrive already reduced over ranks: nothing here knows
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import UserError
from megarl.monitor.console import ConsoleSink
from megarl.monitor.jsonl import JsonlSink
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import Registry
from megarl.monitor.settings import LogSettings, SinkName
from megarl.monitor.wandb_sink import WandbSink

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step. Names are registered, values are Python floats, steps only go up."""

    def close(self, exit_code: int = 0) -> None:
        """Finish writing. Called once, also when the run fails: with what its process ends with."""


class TensorBoardSink:
    """TensorBoard events by torch's own writer. A resumed run hides the events of the steps it repeats."""

    def __init__(self, folder: Path, *, resume_at: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the 'tensorboard' sink needs the tensorboard package: run `pip install tensorboard`, "
                "or take 'tensorboard' out of the sinks."
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=resume_at)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()


class MetricLogger:
    """Checks the names, then hands the numbers to each sink in turn. The file comes first: it is the record."""

    def __init__(self, sinks: Sequence[Sink], registry: Registry) -> None:
        self._sinks, self._registry = tuple(sinks), registry

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics, already reduced over ranks, under the names of docs/metrics.md.

        Raises UnregisteredMetric before any sink has seen the numbers.
        """
        for name in metrics:
            _ = self._registry[name]
        metrics = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self, exit_code: int = 0) -> None:
        """Close every sink, once. exit_code: what the process ends with, 128 + n where signal n stopped the run."""
        sinks, self._sinks = self._sinks, ()
        for sink in sinks:
            sink.close(exit_code)


def open_logger(
    run_folder: Path,
    settings: LogSettings,
    *,
    resume_at: int | None = None,
    total_steps: int | None = None,
    run_name: str | None = None,
    run_config: Mapping[str, Any] | None = None,
) -> MetricLogger:
    """Open the logger of a run.

    run_folder: where `metrics.jsonl`, TensorBoard events and the W&B run live.
    resume_at: the step a resumed run goes on with, None for a new run. What a killed run logged of that step
        and of later ones is replaced. Log a step before saving its checkpoint: then a run killed between the
        two logs the step again, and nothing is lost.
    run_config: the resolved configuration, for W&B.
    Raises UserError for an unwritable folder, or a sink whose library is missing.
    """
    registry = default_registry()
    makers: dict[SinkName, Callable[[], Sink]] = {
        "jsonl": lambda: JsonlSink(run_folder / METRICS_FILE, resume_at=resume_at),
        "console": lambda: ConsoleSink(registry, total_steps=total_steps),
        "tensorboard": lambda: TensorBoardSink(run_folder / "tensorboard", resume_at=resume_at),
        "wandb": lambda: WandbSink(
            run_folder, project=settings.project, run_name=run_name, run_config=run_config
        ),
    }
    return MetricLogger([makers[name]() for name in makers if name in settings.sinks], registry)
