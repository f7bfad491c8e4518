"""Weights & Biases. A run folder keeps its run id, so a resumed run goes on where it was.

Offline unless the user gave a key (`WANDB_API_KEY`) or chose a mode (`WANDB_MODE`), the library's own
variables. No trouble with W&B ever stops training: the first failure is told once, and the sink falls silent.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.monitor.files import write_atomic

ID_FILE = "wandb_run_id"


class WandbSink:
    """Logs every metric against the column `step`, so that steps repeated after a resume overlay the old ones.

    (W&B's own step counter only goes up: after a resume from an earlier checkpoint it would refuse them.)
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        project: str = "megarl",
        run_name: str | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._run: Any = None
        try:
            import wandb

            self._run = wandb.init(
                project=project,
                name=run_name or run_folder.resolve().name,
                id=_run_id(run_folder),
                dir=str(run_folder),
                config=dict(run_config or {}),
                resume="allow",
                mode=None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline",
                settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # whatever goes wrong in W&B, training goes on
            self._give_up(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guarded(lambda run: run.log({**metrics, "step": step}))

    def close(self) -> None:
        self._guarded(lambda run: run.finish())
        self._run = None

    def _guarded(self, call: Any) -> None:
        if self._run is not None:
            try:
                call(self._run)
            except Exception as error:  # as above
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warnings.warn(
            "W&B failed and is off for the rest of this run; training goes on and metrics.jsonl has every "
            f"number. ({type(error).__name__}: {error})",
            RuntimeWarning,
            stacklevel=3,
        )


def _run_id(run_folder: Path) -> str:
    """Return the id kept in the run folder, made on the first call."""
    path = run_folder / ID_FILE
    if path.exists():
        return path.read_text().strip()
    run_id = secrets.token_hex(4)
    write_atomic(path, run_id + "\n")
    return run_id
