"""`metrics.jsonl`: one line a step, in an order and a number format that two identical runs share.

Keys are sorted and every value is written as a float in its shortest exact form, so two runs of one seed
differ only in the metrics the registry marks as timings. JSON has no nan or infinity: they are written as the
strings "NaN", "Infinity" and "-Infinity", which `float()` and pandas read back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.errors import UserError
from megarl.monitor.files import cannot_write, write_atomic


class JsonlSink:
    """Appends one line a step; each line is on the disk before `log` returns.

    resume_at: the step a resumed run goes on with. Lines of that step and of later ones, which the killed run
        left behind, are taken out first, and so is a half-written last line. None: a new run, which refuses
        an old file.
    Raises UserError for an unwritable path, a full disk (the file then ends with its last whole line), a new
    run over an old file, and a damaged line that is not the last one.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        self.path = path
        whole, dropped = _lines_before(path, resume_at or 0)
        if resume_at is None and (whole or dropped):
            raise UserError(
                f"{path} already holds the metrics of a run. Resume that run, or choose another run folder."
            )
        self._last_step = whole[-1][0] if whole else -1
        if dropped:
            write_atomic(path, b"".join(line for _, line in whole))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (lives as long as the sink)
        except OSError as error:
            raise cannot_write(path, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of this step. Steps only go up, so that none is ever in the file twice."""
        if step <= self._last_step:
            raise ValueError(f"{self.path}: step {step} was logged after step {self._last_step}")
        line = encode_line(step, metrics)
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(None, "disk full")
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise cannot_write(self.path, error) from error
        self._last_step = step

    def close(self, exit_code: int = 0) -> None:
        self._file.close()


def encode_line(step: int, metrics: Mapping[str, float]) -> bytes:
    """Return one line of `metrics.jsonl`, newline included."""
    row: dict[str, int | float | str] = {name: _plain(float(value)) for name, value in metrics.items()}
    return json.dumps({**row, "step": step}, sort_keys=True, allow_nan=False).encode() + b"\n"


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metrics) of each line, without a half-written last one; a damaged one before it is a UserError."""
    return (row for _, row in _lines(path) if row is not None)


def _lines_before(path: Path, first_step: int) -> tuple[list[tuple[int, bytes]], int]:
    """Return the whole lines of earlier steps, each with its step, and how many lines must go or be mended."""
    kept: list[tuple[int, bytes]] = []
    dropped = 0
    for line, row in _lines(path):
        if row is None or row[0] >= first_step:
            dropped += 1
            continue
        if not line.endswith(b"\n"):  # killed between a line and its newline: the line is whole
            dropped += 1
            line += b"\n"
        kept.append((row[0], line))
    return kept, dropped


def _lines(path: Path) -> Iterator[tuple[bytes, tuple[int, dict[str, float]] | None]]:
    """(line with its newline, its step and metrics): None for a half-written last line; none without a file."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}).") from error
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None and number < len(lines):
            raise UserError(
                f"{path}, line {number}: not a line of metrics, and not the last line, so no interrupted write "
                "explains it. Mend or delete that line, then try again."
            )
        yield line, row


def _parse(line: bytes) -> tuple[int, dict[str, float]] | None:
    try:
        row = json.loads(line)
        step = row.pop("step")
        return int(step), {name: float(value) for name, value in row.items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
