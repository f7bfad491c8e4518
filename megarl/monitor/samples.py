"""Samples of every Nth step, for people: what was asked and answered and what it earned, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.monitor.files import write_atomic
from megarl.records import Group, Sample


class SampleWriter:
    """Writes `samples/step_000010.jsonl` in the run folder, one response a line; a file is whole or absent.

    every: write the steps this divides; 0 writes none.
    enabled: False on ranks whose samples are not wanted; then `write` does nothing.
    """

    def __init__(self, run_folder: Path, *, every: int, enabled: bool = True) -> None:
        self._folder = run_folder / "samples"
        self._every, self._enabled = every, enabled

    def write(self, step: int, groups: Iterable[Group]) -> Path | None:
        """Write this step's samples. Returns their file, or None if this step is not written.

        Raises UserError if the file cannot be written.
        """
        if not self._enabled or not self._every or step % self._every:
            return None
        lines = [
            json.dumps(sample_row(step, group, sample), ensure_ascii=False)
            for group in groups
            for sample in group.samples
        ]
        path = self._folder / f"step_{step:06d}.jsonl"
        # A verifier's reason may hold half a character, which only JSON can spell.
        write_atomic(path, "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace"))
        return path


def sample_row(step: int, group: Group, sample: Sample) -> dict[str, Any]:
    """One response as plain data; the engine's log-probabilities in the shortest form that is exact in float32."""
    return {
        "step": step,
        "prompt_id": group.prompt.prompt_id,
        "sample_id": sample.sample_id,
        "prompt": group.prompt.text,
        "response": sample.text,
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "unscored_reason": sample.unscored_reason,
        "group_dropped": group.dropped,
        "finish_reason": sample.finish_reason,
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in sample.spans],
        "prompt_ids": group.prompt.token_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "logprobs": [_shortest(value) for value in sample.logprobs],
        "loss_mask": sample.loss_mask.astype(int).tolist(),
    }


def _shortest(value: np.float32) -> float | None:
    """`-0.1`, not `-0.10000000149011612`. JSON has no infinity: None."""
    return float(str(value)) if np.isfinite(value) else None
