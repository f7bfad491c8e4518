"""What a group that was chosen by its raw rewards becomes before it is learned from: DAPO's answers to overlong
responses (arXiv:2503.14476, section 3.4)."""

from __future__ import annotations

import dataclasses

import torch

from megarl.algorithms import soft_overlong_penalty
from megarl.records import Group
from megarl.rewards import RewardSettings, add_once, mask_overlong


def settle_overlong(group: Group, rewards: RewardSettings, max_new_tokens: int) -> Group:
    """The group with its overlong responses punished (exactly once: a second time is a ValueError) and, where asked
    for, truncated ones masked. A dropped group stays as it is: nothing is learned from it.
    """
    if group.dropped is not None:
        return group
    samples = group.samples
    if rewards.soft_overlong is not None:
        lengths = torch.tensor([len(sample.response_ids) for sample in samples])
        amounts = soft_overlong_penalty(lengths, max_new_tokens, rewards.soft_overlong).tolist()
        samples = tuple(add_once(s, "soft_overlong", a) for s, a in zip(samples, amounts, strict=True))
    if rewards.overlong_filtering:
        samples = tuple(map(mask_overlong, samples))
    return dataclasses.replace(group, samples=samples)
