"""The learning rate of every step of a stage."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.megatron.jobs import rates_job
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed

STEPS = 4
SCHEDULES = {
    "constant": {},
    "linear": {"schedule": "linear"},
    "linear to a floor": {"schedule": "linear", "min_lr": 0.5},
    "cosine": {"schedule": "cosine"},
    "a warm-up of one step": {"schedule": "linear", "warmup_steps": 1},
    "warm-up, linear": {"schedule": "linear", "warmup_steps": 2},
    "warm-up, cosine": {"schedule": "cosine", "warmup_steps": 2},
    "nothing but warm-up": {"schedule": "linear", "warmup_steps": 4},
    "warm-up, constant": {"warmup_steps": 2},
}


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


EXPECTED = {
    "constant": [1, 1, 1, 1],
    "linear": [1, 3 / 4, 2 / 4, 1 / 4],
    "linear to a floor": [1, 7 / 8, 6 / 8, 5 / 8],
    "cosine": [1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)],
    "a warm-up of one step": [1, 3 / 4, 2 / 4, 1 / 4],
    "warm-up, linear": [1 / 2, 1, 2 / 3, 1 / 3],
    "warm-up, cosine": [1 / 2, 1, cosine(1 / 3), cosine(2 / 3)],
    "nothing but warm-up": [1 / 4, 2 / 4, 3 / 4, 1],
    "warm-up, constant": [1 / 2, 1, 1, 1],
}


def test_every_step_trains_the_first_and_the_last_one_too(ranks: RankPool, moe_checkpoint: Path) -> None:
    """min_lr is what the step after the last one would have."""
    rates = ranks.run(1, rates_job, checkpoint=moe_checkpoint, schedules=SCHEDULES, steps=STEPS)[0]
    assert rates.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert rates[name] == pytest.approx(expected), name
