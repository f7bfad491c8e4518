"""TensorBoard events, through torch's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.errors import UserError


class TensorBoardSink:
    """Scalars under their registered names. A resumed run hides the events of the steps it repeats."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the 'tensorboard' sink needs the tensorboard package: run `pip install tensorboard`, "
                "or take 'tensorboard' out of the sinks."
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=resume_at)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
