"""What saving and loading a training checkpoint costs, beside torch.save of as many bytes; and what of it the training
waits for when it is written behind.

    python benchmarks/checkpoint.py [--layers 2] [--turns 7] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from measure import Timing, in_turns
from step import StepSize, make_trainer

from megarl.megatron.checkpoint import begin_checkpoint, load_checkpoint
from megarl.megatron.groups import destroy_groups
from megarl.megatron.policy import Policy
from megarl.training.saving import PendingCheckpoint


def bench_checkpoint(size: StepSize, *, turns: int, below: Path | None = None) -> str:
    """Seconds and MB/s of saving and loading, on this process alone; a table for people.

    below: an existing folder of the disk to measure; None = that of temporary files. Leaves nothing behind.
    """
    with tempfile.TemporaryDirectory(dir=below) as folder:
        try:
            return _bench(make_trainer(size, Path(folder) / "policy"), Path(folder), turns)
        finally:
            destroy_groups()


def _bench(policy: Policy, folder: Path, turns: int) -> str:
    final = folder / "checkpoint"
    parameters = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
    state = [p.to("cpu", torch.float32, copy=True) for p in parameters for _ in range(4)]
    blocked: list[float] = []

    def begin(*, copied: bool) -> PendingCheckpoint:
        scratch = folder / "writing"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        return PendingCheckpoint(scratch, final, "{}", [begin_checkpoint(scratch, policy, copied=copied)])

    def plain() -> None:
        with (folder / "plain.pt").open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())

    def save() -> None:
        checkpoint = begin(copied=False)
        checkpoint.write()
        checkpoint.complete(policy.groups, keep=1)

    def behind() -> None:
        start = time.perf_counter()
        checkpoint = begin(copied=True)
        begun = time.perf_counter()
        thread.submit(checkpoint.write).result()
        written = time.perf_counter()
        checkpoint.complete(policy.groups, keep=1)
        blocked.append(begun - start + time.perf_counter() - written)

    variants = {
        "torch.save": plain,
        "save": save,
        "save behind": behind,
        "load": lambda: load_checkpoint(final, policy),
    }
    with ThreadPoolExecutor(1) as thread:
        timings = in_turns(variants, turns=turns)
    waited = tuple(blocked[-turns:])
    first = timings["torch.save"].seconds
    timings["of it waited"] = Timing(waited, tuple(a / b for a, b in zip(waited, first, strict=True)))
    sizes = {"torch.save": (folder / "plain.pt").stat().st_size}
    total = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    lines = [
        f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters, {policy.config.params_dtype}, "
        f"{policy.platform.kind}, {folder}; torch.save writes four float32 copies of the parameters; saving includes "
        "fsync and checksums"
    ]
    for name, timing in timings.items():
        size = sizes.get(name, total) / 1e6
        rate = size / statistics.median(timing.seconds)
        lines.append(f"{name:<13} {size:7.1f} MB {rate:8.0f} MB/s {timing}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--layers", type=int, default=2, help="layers of the policy, 28 MB of training state each"
    )
    parser.add_argument(
        "--turns", type=int, default=7, help="times that each variant is measured, at least 2"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the disk to measure; else that of temporary files"
    )
    options = parser.parse_args()
    size = StepSize(layers=options.layers, hidden_size=256, expert_size=256)
    print(bench_checkpoint(size, turns=options.turns, below=options.folder))


if __name__ == "__main__":
    main()
