"""A training step with recomputed old log-probabilities and with the engine's, on the same samples.

python benchmarks/logprob_source.py [--size tiny|small|deep|wide|all] [--turns 7]
"""

from __future__ import annotations

from step import bench_sizes, step_options

VARIANTS = {"recompute": ("recompute", "off"), "engine": ("engine", "off")}


def main() -> None:
    options = step_options(__doc__.split("\n\n")[0]).parse_args()
    bench_sizes(options.size, VARIANTS, turns=options.turns)


if __name__ == "__main__":
    main()
