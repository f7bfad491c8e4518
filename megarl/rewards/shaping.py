"""What happens to a reward after it was scored: amounts added once, and overlong filtering.

Order matters. Grouping decisions (dynamic sampling: is the group all right or all wrong?) read the raw
reward; then an amount such as DAPO's soft overlong punishment (`megarl.algorithms.soft_overlong_penalty`) is
added; then come the
advantages:

    kept = [group for group in groups if informative([raw_reward(s) for s in group.samples])]
    shaped = add_once(sample, "soft_overlong", soft_overlong_penalty(...))
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megarl.records import Sample

RAW = "raw"


def add_once(sample: Sample, name: str, amount: float) -> Sample:
    """`sample` with `amount` added to its reward and logged as `reward_parts[name]`; the raw reward is kept.

    An unscored sample stays unscored. Raises ValueError where `name` was added before: a punishment is
    applied exactly once, however often a partial rollout passes through.
    """
    if name in sample.reward_parts:
        raise ValueError(f"sample {sample.sample_id!r}: {name!r} was added to its reward before")
    parts = {RAW: sample.reward, **sample.reward_parts, name: amount}
    reward = None if sample.reward is None else sample.reward + amount
    return dataclasses.replace(sample, reward=reward, reward_parts=parts)


def raw_reward(sample: Sample) -> float | None:
    """The reward as it was scored, whatever was added to it since."""
    return sample.reward_parts.get(RAW, sample.reward)


def mask_overlong(sample: Sample) -> Sample:
    """DAPO's overlong filtering: a truncated response keeps its reward (its group's statistics are true), but
    none of its tokens is trained on."""
    if sample.finish_reason != "length":
        return sample
    return dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
