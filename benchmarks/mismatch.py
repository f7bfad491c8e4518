"""A table of engine against trainer, with and without replayed routes, from runs of experiments/engine_mismatch.

python benchmarks/mismatch.py runs/engine_mismatch/quickstart_* runs/engine_mismatch/larger_*
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

NUMBERS = {
    "k3, live": "audit/k3",
    "k3, R3": "mismatch/k3",
    "outside [1/2, 2], live": "audit/ratio_outside",
    "outside, R3": "mismatch/ratio_outside",
    "mean |difference|, live": "audit/abs_diff_mean",
    "mean |difference|, R3": "mismatch/abs_diff_mean",
    "routes that differ": "routing/flip_share_first",
    "tokens that differ": "routing/token_flip_share",
}


def main() -> None:
    print("| run | tokens | " + " | ".join(NUMBERS) + " |")
    print("|---" * (len(NUMBERS) + 2) + "|")
    for folder in map(Path, sys.argv[1:]):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "audit/k3" in row]
        values = [f"{np.mean([row[name] for row in rows]):.2g}" for name in NUMBERS.values()]
        tokens = int(sum(row["audit/tokens"] for row in rows))
        print(f"| {folder.name} | {tokens} | " + " | ".join(values) + " |")


if __name__ == "__main__":
    main()
