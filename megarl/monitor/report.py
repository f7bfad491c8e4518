"""What a run did: the table at its end, and `megarl report RUN_FOLDER` at any time.

The report needs nothing but `metrics.jsonl`, so it works on a run that still goes on, and on one that was killed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megarl.errors import UserError, printable
from megarl.monitor.alarms import DEFAULT_RULES, Alarm, AlarmWatch
from megarl.monitor.console import number
from megarl.monitor.files import write_atomic
from megarl.monitor.jsonl import read_metrics
from megarl.monitor.metrics import default_registry
from megarl.monitor.progress import duration
from megarl.monitor.registry import Registry

Rows = Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics)
CURVES = (
    "eval/accuracy",
    "rollout/accuracy",
    "rollout/reward_mean",
    "rollout/response_length_mean",
    "sft/loss",
    "train/entropy",
    "train/grad_norm",
    "mismatch/k3",
)


def print_summary(
    title: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    seconds: Mapping[str, float],
    results: Mapping[str, Path],
) -> None:
    """Print the table at the end of a run: before, after, change; time per phase; where the results lie.

    before, after: metrics by registered name, for example of the evaluation after the cold start and of the last
    one. seconds: time per phase, in the order they are shown. results: what lies where, for example
    {"Hugging Face checkpoint": folder}.
    """
    _say(title)
    table = _columns("", "before", "after", "change")
    for name in {**before, **after}:
        one, other = before.get(name, math.nan), after.get(name, math.nan)
        table.add_row(printable(name), _shown(one), _shown(other), _change(one, other))
    get_console().print(table)
    if seconds:
        whole = sum(seconds.values())
        times = _columns("phase", "time", "share")
        for phase, time in seconds.items():
            times.add_row(phase, duration(time), f"{time / whole:.0%}" if whole else "")
        times.add_section()
        times.add_row("in all", duration(whole), "")
        get_console().print(times)
    for what, path in results.items():
        _say(f"{what}: {path}")


@dataclass(frozen=True)
class RunReport:
    """A run as its metrics tell it.

    first, last: each metric's first and last logged value. best: (step, value) of the highest of each `accuracy` and
    `reward_mean`. seconds: summed over the steps, by metric. alarms: those that the default rules find.
    """

    steps: int
    last_step: int
    first: Mapping[str, float]
    last: Mapping[str, float]
    best: Mapping[str, tuple[int, float]]
    seconds: Mapping[str, float]
    alarms: tuple[Alarm, ...]


def sum_up(rows: Rows) -> RunReport:
    """Sum up a run's metrics, of which there are some."""
    watch = AlarmWatch(DEFAULT_RULES, default_registry())
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    best: dict[str, tuple[int, float]] = {}
    seconds: dict[str, float] = {}
    alarms: list[Alarm] = []
    for step, metrics in rows:
        alarms += watch.check(step, metrics)
        for name, value in metrics.items():
            first.setdefault(name, value)
            last[name] = value
            if name.endswith(("accuracy", "reward_mean")) and value > best.get(name, (0, -math.inf))[1]:
                best[name] = (step, value)
            if name.endswith("seconds") or name == "perf/step_time":
                seconds[name] = seconds.get(name, 0.0) + value
    return RunReport(len(rows), rows[-1][0], first, last, best, seconds, tuple(alarms))


def report_run(run_folder: Path) -> list[Path]:
    """Print a run's summary and write its curves into its folder; returns the files written.

    Those are `curves.csv` (every metric, one row a step) and, where matplotlib is installed, `curves.png`.
    Raises UserError if the folder holds no metrics.
    """
    metrics_file = run_folder / "metrics.jsonl"
    rows = list(read_metrics(metrics_file))
    if not rows:
        raise UserError(f"{metrics_file}: no metrics. Is {run_folder} the folder of a run that made a step?")
    report, registry = sum_up(rows), default_registry()
    _say(f"{run_folder}: {report.steps} steps, the last is step {report.last_step}")
    get_console().print(_table(report, registry))
    for alarm in report.alarms:
        _say(f"alarm, {alarm}")
    written = [write_csv(rows, run_folder / "curves.csv")]
    if picture := draw_curves(rows, run_folder / "curves.png", registry):
        written.append(picture)
    for path in written:
        _say(f"curves: {path}")
    return written


def write_csv(rows: Rows, path: Path) -> Path:
    """Write every metric as a column, one row a step; empty where a step has no value."""
    names = sorted({name for _, metrics in rows for name in metrics})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *names])
    writer.writerows([step, *(metrics.get(name, "") for name in names)] for step, metrics in rows)
    write_atomic(path, text.getvalue())
    return path


def draw_curves(rows: Rows, path: Path, registry: Registry) -> Path | None:
    """Draw the curves that tell whether a run learns (`CURVES`). Returns None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    shown = [name for name in CURVES if any(name in metrics for _, metrics in rows)]
    height = math.ceil(len(shown) / 3)
    figure = Figure(figsize=(12, 2.8 * max(1, height)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(shown, start=1):
        axes = figure.add_subplot(height, 3, place)
        points = [(step, metrics[name]) for step, metrics in rows if name in metrics]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel(registry[name].unit)
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    write_atomic(path, picture.getvalue())
    return path


def _table(report: RunReport, registry: Registry) -> Table:
    table = _columns("metric", "first", "last", "best, or in all")
    for name in sorted(report.last, key=lambda name: (registry.place(name), name)):
        whole = duration(report.seconds[name]) if name in report.seconds else ""
        best = f"{number(report.best[name][1])} @{report.best[name][0]}" if name in report.best else whole
        table.add_row(printable(name), number(report.first[name]), number(report.last[name]), best)
    return table


def _columns(words: str, *numbers: str) -> Table:
    """Return a table whose numbers are never cut: on a narrow screen the words of the first column fold."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column(words, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _say(line: str) -> None:
    get_console().print(printable(line), highlight=False, soft_wrap=True, markup=False)


def _shown(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def _change(before: float, after: float) -> str:
    change = after - before
    return "" if math.isnan(change) else f"+{number(change)}" if change > 0 else number(change)
