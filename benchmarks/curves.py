"""One CSV of the RL stage's curves from several run folders, as committed under docs/results/.

    python benchmarks/curves.py runs/a runs/b > docs/results/quickstart.csv

A row for each step of each run; the step 0 is the policy before RL. Empty = not measured at that step.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

COLUMNS = {
    "eval/accuracy": "heldout_accuracy",
    "eval/response_length_mean": "heldout_length",
    "rollout/accuracy": "sampled_accuracy",
    "rollout/response_length_mean": "sampled_length",
    "train/clip_fraction": "clip_fraction",
    "train/entropy": "entropy",
    "mismatch/k3": "mismatch_k3",
    "routing/flip_share_last": "route_flip_share",
    "perf/step_time": "step_seconds",
}


def rows_of(folder: Path) -> list[dict[str, object]]:
    """The run's RL steps."""
    state = json.loads((sorted((folder / "checkpoints").glob("step_*"))[-1] / "state.json").read_text())
    rows = [{"step": 0, **state["before"]}]
    first = None
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "rollout/accuracy" in row:
            first = first or row["step"]
            rows.append({**row, "step": row["step"] - first + 1})
    return rows


def main() -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["run", "step", *COLUMNS.values()])
    for folder in map(Path, sys.argv[1:]):
        for row in rows_of(folder):
            values = [row.get(name) for name in COLUMNS]
            out.writerow([folder.name, row["step"], *(f"{v:.6g}" if v is not None else "" for v in values)])


if __name__ == "__main__":
    main()
