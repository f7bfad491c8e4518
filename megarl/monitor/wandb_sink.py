"""Weights & Biases. A run folder keeps its run id, so a resumed run goes on where it was.

What the library's own variables say (`WANDB_NAME`, `WANDB_RUN_ID`, ...) goes before megarl's defaults, and
`log.project` before `WANDB_PROJECT`. Offline unless the user gave a key (`WANDB_API_KEY`) or chose a mode
(`WANDB_MODE`). No trouble with W&B ever stops training: the first failure is told once, and the sink falls silent.
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
        project: str | None = None,
        run_name: str | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._run: Any = None
        try:
            import wandb

            self._run = wandb.init(
                project=project or _unless("WANDB_PROJECT", "megarl"),
                name=_unless("WANDB_NAME", run_name or run_folder.resolve().name),
                id=_run_id(run_folder),
                dir=_unless("WANDB_DIR", str(run_folder)),
                config=dict(run_config or {}),
                resume=_unless("WANDB_RESUME", "allow"),
                mode=None if os.environ.get("WANDB_API_KEY") else _unless("WANDB_MODE", "offline"),
                settings={
                    "console": _unless("WANDB_CONSOLE", "off"),
                    "silent": _unless("WANDB_SILENT", True),
                    "disable_code": _unless("WANDB_DISABLE_CODE", True),
                    "disable_git": _unless("WANDB_DISABLE_GIT", True),
                },
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # whatever goes wrong in W&B, training goes on
            self._give_up(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guarded(lambda run: run.log({**metrics, "step": step}))

    def close(self, exit_code: int = 0) -> None:
        """Finish the run: W&B shows one with another code than 0 as failed, or as preempted where a signal stopped
        it."""
        if exit_code > 128:
            self._guarded(lambda run: run.mark_preempting())
        self._guarded(lambda run: run.finish(exit_code=exit_code))
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


def _unless(variable: str, default: Any) -> Any:
    """Return None where the variable is set, since the library reads it; else the default."""
    return None if os.environ.get(variable) else default


def _run_id(run_folder: Path) -> str:
    """Return the id kept in the run folder; `WANDB_RUN_ID` is, too, for when the run goes on without it."""
    path = run_folder / ID_FILE
    kept = path.read_text().strip() if path.exists() else None
    run_id = os.environ.get("WANDB_RUN_ID") or kept or secrets.token_hex(4)
    if run_id != kept:
        write_atomic(path, run_id + "\n")
    return run_id
