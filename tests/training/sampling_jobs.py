"""A job that samples steps without learning from them; responses are drawn by their seeds alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.golden import WORDS, forty_prompts
from tests.training.jobs import open_tiny, prepared


def sampling_job(folder: Path, steps: int, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of each step, this replica's groups and the prompt stream's state after it; then of all steps but the first once
    more, from the state after the first."""
    run = open_tiny(folder, *WORDS, forty_prompts(folder), *words)
    source = prepared(run, "rl").source
    found: list[dict[str, Any]] = []
    for step in (*range(1, steps + 1), *range(2, steps + 1)):
        if len(found) == steps:
            source.load_state_dict(found[0]["state"])
        groups = source.sample(step)
        found.append({"groups": groups, "state": source.state_dict()})
    run.close()
    return found
