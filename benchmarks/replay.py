"""A training step with and without routing replay (R2 recorded, R3 the engine's), on the same samples, and the memory
of routes over many steps.

    python benchmarks/replay.py [--size tiny|small|deep|wide|all] [--turns 7] [--memory-steps 200]
"""

from __future__ import annotations

import numpy as np
import psutil
from step import bench_sizes, step_options

from megarl.routing.store import RouteStore

VARIANTS = {
    "recompute": ("recompute", "off"),
    "recompute + R2": ("recompute", "recorded"),
    "recompute + R3": ("recompute", "engine"),
}


def memory_over_steps(steps: int, *, tokens: int = 4096, layers: int = 48, top_k: int = 8) -> list[int]:
    """Resident bytes of this process after each of `steps` steps that store and free the routes of a rollout."""
    rng = np.random.default_rng(0)
    experts = rng.random((tokens, layers, 16)).argsort(-1)[..., :top_k].astype(np.uint8)
    process, resident = psutil.Process(), []
    for step in range(steps):
        store = RouteStore(in_memory_bytes=experts.nbytes * 4)
        for n in range(8):
            store.add(f"{step}/{n}", experts.copy(), np.zeros(tokens, bool))
        store.close()
        resident.append(process.memory_info().rss)
    return resident


def main() -> None:
    parser = step_options(__doc__.split("\n\n")[0])
    parser.add_argument("--memory-steps", type=int, default=200, help="steps over which memory is watched")
    options = parser.parse_args()
    bench_sizes(options.size, VARIANTS, turns=options.turns)
    resident = memory_over_steps(options.memory_steps)
    tenth = max(1, options.memory_steps // 10)
    early, last = max(resident[:tenth]), max(resident[-tenth:])
    print(
        f"resident memory with 12 MiB of routes a step: {early / 2**20:.0f} MiB in the first tenth of "
        f"{options.memory_steps} steps, {last / 2**20:.0f} MiB in the last"
    )


if __name__ == "__main__":
    main()
