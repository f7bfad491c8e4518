"""Advantages of whole responses, by explicit group id (formulas in `parts.ADVANTAGES`).

Statistics are taken in float64 over the scored responses of a group. A group whose rewards are all exactly
equal has advantage exactly 0: no rounding noise is ever divided by a rounding error. So has a group of one
(but for remax, whose baseline is the greedy response, and reinforce_pp, which has no groups).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import metrics as m
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import SumReduce

STD_EPSILON = 1e-6
_ROUNDING = 1e-12


class Rewards(NamedTuple):
    """Rewards with their groups; float64 [R] but where said. An unscored response has reward 0 and scored
    0."""

    reward: Tensor
    scored: Tensor  # 1.0 | 0.0
    group: Tensor  # int64, 0 .. groups - 1
    lengths: Tensor | None
    greedy: Tensor | None
    reduce_sum: SumReduce | None

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        group_ids: Tensor,
        lengths: Tensor | None = None,
        greedy: Tensor | None = None,
        reduce_sum: SumReduce | None = None,
    ) -> Rewards:
        """NaN in rewards or greedy: unscored. Raises ValueError for other shapes than the rewards'."""
        for name, tensor in (("group_ids", group_ids), ("lengths", lengths), ("greedy_rewards", greedy)):
            if tensor is not None and tensor.shape != rewards.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, rewards {list(rewards.shape)}")
        scored = ~rewards.isnan() if greedy is None else ~(rewards.isnan() | greedy.isnan())
        _, group = torch.unique(group_ids, return_inverse=True)
        return cls(
            reward=torch.where(scored, rewards.double(), 0.0),
            scored=scored.double(),
            group=group,
            lengths=None if lengths is None else lengths.double(),
            greedy=None if greedy is None else torch.where(scored, greedy.double(), 0.0),
            reduce_sum=reduce_sum,
        )

    def group_sum(self, values: Tensor) -> Tensor:
        """[R]: the sum over each response's group. values: 0 where unscored."""
        return torch.zeros_like(self.reward).index_add(0, self.group, values)[self.group]

    def size(self) -> Tensor:
        """[R]: scored responses in the group, at least 1."""
        return self.group_sum(self.scored).clamp(min=1)

    def flat(self) -> Tensor:
        """bool [R]: all scored rewards of the group are exactly equal (or there are none)."""
        far = torch.full_like(self.reward, torch.inf)
        low = far.scatter_reduce(0, self.group, torch.where(self.scored > 0, self.reward, far), "amin")
        high = (-far).scatter_reduce(0, self.group, torch.where(self.scored > 0, self.reward, -far), "amax")
        return (low >= high)[self.group]

    def centred(self) -> Tensor:
        """[R]: R - mean of the group; exactly 0 in a flat group."""
        mean = self.group_sum(self.reward) / self.size()
        return torch.where(self.flat(), 0.0, self.reward - mean) * self.scored


def compute_advantages(
    recipe: Recipe,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    reduce_sum: SumReduce | None = None,
) -> Tensor:
    """float32 [R]: one advantage per response, from the rewards of everything this replica sampled.

    rewards: [R]; NaN = unscored: left out of its group's statistics, advantage 0 (mask its tokens).
    group_ids: int [R], any numbers; groups may have any sizes, and each lives on one replica. lengths: [R],
    active tokens, for opo, reinforce_pp and its baseline form. greedy_rewards: [R], of the greedy response to
    the same prompt, for remax; where it is NaN the advantage is 0. reduce_sum: sums a small vector over
    data-parallel replicas (whitening reduces over those only); every replica then calls it twice.
    A KL in the reward isn't known here: `token_advantages` has it. Raises ValueError for a missing or
    misshapen argument and for infinite rewards.
    """
    if rewards.ndim != 1:
        raise ValueError(f"rewards must be [R], not {list(rewards.shape)}")
    function = ADVANTAGES.get(recipe.advantage)
    if function is None:
        raise ValueError(
            f"{recipe.name}: advantage {recipe.advantage!r} needs a critic's values, use token_advantages"
        )
    for given in (rewards, greedy_rewards):
        if given is not None:
            refuse_infinite(given)
    return function(recipe, Rewards.of(rewards, group_ids, lengths, greedy_rewards, reduce_sum)).float()


def refuse_infinite(rewards: Tensor) -> None:
    """Raises ValueError that names the first response, [R], with an infinite reward."""
    infinite = rewards.isinf().nonzero()
    if len(infinite):
        raise ValueError(f"infinite reward at response {int(infinite[0])}: it has no advantage")


def _grpo(recipe: Recipe, rewards: Rewards) -> Tensor:
    centred, size = rewards.centred(), rewards.size()
    if recipe.std == "none":
        return centred
    degrees = size if recipe.std == "population" else (size - 1).clamp(min=1)
    std = (rewards.group_sum(centred.square()) / degrees).sqrt()
    return centred / (std + STD_EPSILON)


def _dr_grpo(recipe: Recipe, rewards: Rewards) -> Tensor:
    return rewards.centred()


def _rloo(recipe: Recipe, rewards: Rewards) -> Tensor:
    size = rewards.size()
    return rewards.centred() * size / (size - 1).clamp(min=1)


def _opo(recipe: Recipe, rewards: Rewards) -> Tensor:
    lengths = _needed(recipe, rewards.lengths, "lengths") * rewards.scored
    baseline = rewards.group_sum(lengths * rewards.reward) / rewards.group_sum(lengths).clamp(min=1)
    return torch.where(rewards.flat(), 0.0, rewards.reward - baseline) * rewards.scored


def _remax(recipe: Recipe, rewards: Rewards) -> Tensor:
    return (rewards.reward - _needed(recipe, rewards.greedy, "greedy_rewards")) * rewards.scored


def _reinforce_pp(recipe: Recipe, rewards: Rewards) -> Tensor:
    tokens = _needed(recipe, rewards.lengths, "lengths") * rewards.scored
    return whiten(rewards.reward, tokens, rewards.reduce_sum) * rewards.scored


def _reinforce_pp_baseline(recipe: Recipe, rewards: Rewards) -> Tensor:
    tokens = _needed(recipe, rewards.lengths, "lengths") * rewards.scored
    white = whiten(rewards.centred(), tokens, rewards.reduce_sum)
    return torch.where(rewards.flat(), 0.0, white) * rewards.scored


ADVANTAGES: Mapping[str, Callable[[Recipe, Rewards], Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "opo": _opo,
    "remax": _remax,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}


def whiten(values: Tensor, weights: Tensor, reduce_sum: SumReduce | None = None) -> Tensor:
    """float64 [n]: (values - mean) / (std + 1e-6) under weights, over the batches of all replicas.

    values, weights: [n]. reduce_sum: sums a small float64 vector over replicas, called twice (the variance is
    taken around the global mean, so large rewards lose no digits). All 0 where nothing has weight or
    everything is equal.
    """
    values, weights = values.double(), weights.double()
    reduce = reduce_sum or (lambda x: x)
    total, weight = reduce(torch.stack([(weights * values).sum(), weights.sum()])).unbind()
    mean = total / weight.clamp(min=1)
    centred = values - mean
    variance = reduce((weights * centred.square()).sum().reshape(1))[0] / weight.clamp(min=1)
    std = variance.sqrt()
    return torch.where(std > _ROUNDING * mean.abs(), centred / (std + STD_EPSILON), 0.0)


@torch.no_grad()
def advantage_metrics(*, rewards: Tensor, group_ids: Tensor) -> m.Metrics:
    """What the groups of this replica can teach; summed over data-parallel replicas. rewards, group_ids:
    [R]."""
    batch = Rewards.of(rewards, group_ids)
    size = batch.group_sum(batch.scored)
    one_each = batch.scored / batch.size()  # adds up to 1 over the scored responses of a group
    return {
        "train/zero_variance_groups": m.mean_of(batch.flat(), one_each * (size > 1)),
        "train/groups_of_one": m.sum_of(one_each * (size == 1)),
        "train/unscored_responses": m.sum_of(1.0 - batch.scored),
    }


def _needed(recipe: Recipe, tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"compute_advantages: {name} are needed by advantage {recipe.advantage!r}")
    return tensor
