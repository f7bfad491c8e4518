"""What a time limit counts: not the machine's other work, but all of a program's own."""

from __future__ import annotations

import pytest

from megarl.rewards.execution.inside import clock

ONE_SECOND = 1.0


@pytest.mark.parametrize(
    ("threads", "left"),
    [
        ({}, -1.0),  # /proc does not tell: two seconds have passed
        ({1: (2.0, 0.0)}, -1.0),
        ({1: (0.5, 1.5)}, 0.5),  # the machine gave it no processor for a second and a half
        ({1: (0.1, 0.0), 2: (0.2, 1.5)}, 0.5),  # the one that was kept waiting longest counts
        (
            dict.fromkeys(range(16), (0.125, 1.875)),
            -1.0,
        ),  # sixteen that keep each other waiting on one processor
        (dict.fromkeys(range(8), (0.5, 1.5)), -3.0),  # eight on two
    ],
)
def test_a_limit_is_stretched_by_others_work_alone(
    threads: dict[int, tuple[float, float]], left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        clock.tree, "scheduled", lambda pids: threads if now[0] else dict.fromkeys(threads, (0.0, 0.0))
    )
    limit = clock.FairClock(ONE_SECOND, list)
    assert limit.left() == ONE_SECOND
    now[0] = 2.0
    assert limit.left() == pytest.approx(left)
