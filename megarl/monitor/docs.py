"""`docs/metrics.md`, made from the registry: `python -m megarl.monitor.docs [PATH]`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from megarl.monitor.files import write_atomic
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import REDUCTIONS, MetricSpec, Registry

HEADER = """# Metrics

Made from the registry by `python -m megarl.monitor.docs`; edit `megarl/monitor/metrics.py` instead.

Every name megarl can log is here, and no other name can be logged. `{part}` stands for a word that only the
run knows, such as a data set or the reason a group was dropped. Metrics marked *timing* differ between two
otherwise identical runs; all others are equal to the last bit.
"""

TITLES = {
    "eval": "`eval/`: held-out prompts",
    "rollout": "`rollout/`: what the policy wrote",
    "sft": "`sft/`: supervised fine-tuning",
    "train": "`train/`: the policy update",
    "critic": "`critic/`: the value model",
    "mismatch": "`mismatch/`: trainer against engine",
    "sync": "`sync/`: weights on their way to the engines",
    "perf": "`perf/`: time and memory",
}


def render(registry: Registry) -> str:
    """Return the whole page."""
    rooms = sorted(registry, key=lambda metric: _rank(_room(metric)))
    sections = [_section(room, list(rows)) for room, rows in groupby(rooms, key=_room)]
    reductions = "\n".join(f"- `{name}`: {meaning}." for name, meaning in REDUCTIONS.items())
    return "\n".join([HEADER, *sections, f"## How one number is made of many\n\n{reductions}\n"])


def _section(room: str, metrics: list[MetricSpec]) -> str:
    head = "| name | meaning | unit | healthy | reduction |\n|---|---|---|---|---|"
    rows = "\n".join(_row(metric) for metric in metrics)
    return f"## {TITLES.get(room, f'`{room}/`')}\n\n{head}\n{rows}\n"


def _row(metric: MetricSpec) -> str:
    unit = f"{metric.unit}, *timing*" if metric.timing else metric.unit
    cells = (f"`{metric.name}`", metric.meaning, unit, metric.healthy, f"`{metric.reduction}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _room(metric: MetricSpec) -> str:
    return metric.name.split("/")[0]


def _rank(room: str) -> int:
    return list(TITLES).index(room) if room in TITLES else len(TITLES)


if __name__ == "__main__":
    write_atomic(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/metrics.md"), render(default_registry()))
