"""Dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megarl.records import Group

SAME_REWARD = "same_reward"


def fill(
    sample_round: Callable[[int, int], list[Group]], *, wanted: int, rounds: int, dynamic: bool
) -> list[Group]:
    """Groups of as many rounds as it takes to keep `wanted` of them. sample_round(count, place): that many more groups,
    of which `place` came before. dynamic: whether groups of equal rewards are dropped."""
    groups: list[Group] = []
    for _ in range(rounds):
        missing = wanted - sum(g.dropped is None for g in groups)
        if not missing:
            break
        sampled = sample_round(missing, len(groups))
        groups += [_dropped_if_same(g) for g in sampled] if dynamic else sampled
    return groups


def _dropped_if_same(group: Group) -> Group:
    rewards = {s.reward for s in group.samples if s.reward is not None}
    return group if len(rewards) > 1 else replace(group, dropped=SAME_REWARD)
