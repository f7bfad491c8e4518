"""A table of how stable each variant of experiments/moe_stability was: means over its seeds' RL steps.

python benchmarks/stability.py runs/moe_stability/grpo_s0 runs/moe_stability/grpo_s1 ...
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml

Row = dict[str, float]


def numbers(rows: list[Row], minibatches: int) -> dict[str, float]:
    """Of one run: its RL steps, in order."""

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows if name in row] or [np.nan]))

    def most(name: str) -> float:
        return max((row[name] for row in rows if name in row), default=np.nan)

    evaluations = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    flips = [
        (row["routing/flip_share_last"] - row["routing/flip_share_first"]) / (minibatches - 1)
        for row in rows
        if "routing/flip_share_last" in row
    ]
    return {
        "held-out accuracy": evaluations[-1],
        "reward, last 4 steps": float(np.mean([row["rollout/reward_mean"] for row in rows[-4:]])),
        "clipped tokens": mean("train/clip_fraction"),
        "clipped responses": mean("train/seq_clip_fraction"),
        "largest token ratio": most("train/ratio_max"),
        "largest gradient": most("train/grad_norm"),
        "flips an update": float(np.mean(flips)) if flips else float("nan"),
        "engine k3": mean("mismatch/k3"),
        "s a step": float(np.median([row["perf/step_time"] for row in rows])),
    }


def main() -> None:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for folder in map(Path, sys.argv[1:]):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "rollout/reward_mean" in row]
        found[folder.name.rsplit("_s", 1)[0]].append(numbers(rows, config["rl"]["minibatches"]))
    names = list(next(iter(found.values()))[0])
    print("| variant | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for variant, runs in found.items():
        cells = [
            " / ".join(
                f"{run[name]:.2g}" if name != "held-out accuracy" else f"{run[name]:.3f}" for run in runs
            )
            for name in names
        ]
        print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
