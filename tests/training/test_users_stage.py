"""A kind of stage of a user's own: one file outside the package, driven by the same loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.training.stage_jobs import users_stage_job

pytestmark = pytest.mark.distributed


def test_a_kind_of_stage_is_a_few_lines_outside_the_package(ranks: RankPool, quickstart: Path) -> None:
    """Three steps of it after two of the cold start: trained, logged and saved after each, resumed in its middle."""
    folder = quickstart.parent.parent / "users_stage"
    folder.mkdir()
    first, resumed = (ranks.run(1, users_stage_job, folder=folder, steps=steps)[0] for steps in (2, 3))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3, 4, 5]  # the cold start logs its last step
    assert first == {"stage": "polish", "step": 2, "global": 4, "version": 0}
    assert resumed == {"stage": "polish", "step": 3, "global": 5, "version": 0}
    assert all(row["sft/loss"] > 0 for row in rows)
