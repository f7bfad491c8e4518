"""What a folder may hold when a run begins in it: one that begins anew deletes nothing that it did not write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserError
from megarl.monitor.logger import METRICS_FILE
from megarl.training.state import checkpoints_folder, finished_checkpoints

EXPORT = "hf"


def refuse_used_folder(folder: Path, *, resume: bool) -> None:
    """For a run that begins anew: raise UserError where it would prune, overwrite or mix with what another one left.

    Told to resume, it is the run whose folder this is, perhaps killed before its first checkpoint; then only
    checkpoints, all of them damaged, and an exported policy are refused.
    """
    found = next(_left_in(folder, anything=not resume), None)
    if found is None:
        return
    path, what = found
    if resume:
        raise UserError(
            f"{path} {what}, and no good checkpoint of it is there to go on from. What is there stays: move it away to "
            "begin anew, or set another name=..."
        )
    raise UserError(
        f"{path} {what}. With checkpoint.resume=false a run begins anew, and leaves alone what another one wrote. Set "
        "another name=... (or folder=...), move this folder away, or go on with that run: checkpoint.resume=true"
    )


def _left_in(folder: Path, *, anything: bool) -> Iterator[tuple[Path, str]]:
    metrics = folder / METRICS_FILE
    if anything and metrics.is_file() and metrics.stat().st_size:
        yield metrics, "already holds the metrics of a run"
    if checkpoints := finished_checkpoints(checkpoints_folder(folder)):
        yield checkpoints[-1].parent, f"already holds a run's checkpoints, {checkpoints[-1].name} the last"
    if (folder / EXPORT).exists():
        yield folder / EXPORT, "already holds an exported policy"
    for name in ("samples", "tensorboard", "wandb") if anything else ():
        if (folder / name).is_dir() and any((folder / name).iterdir()):
            yield folder / name, "already holds what a run logged"
