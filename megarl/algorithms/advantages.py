"""The slot `advantage`: how much better a response, or a token, is than what was to be expected.

Statistics are taken in float64 over the scored responses of a group. `batches.assign_advantages` calls these
parts on a whole rollout; it takes a KL in the reward from the rewards before, and sees to whitening, unscored
responses and groups of equal rewards after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import metrics as m
from megarl.algorithms.parts import Setting, part
from megarl.algorithms.responses import SumReduce

STD_EPSILON = 1e-6
_ROUNDING = 1e-12


class Rewards(NamedTuple):
    """Rewards of responses with their groups; float64 [responses] but where said.

    An unscored response has reward 0 and scored 0. lengths: active tokens. greedy: the reward of the greedy
    response to the same prompt.
    """

    reward: Tensor
    scored: Tensor  # 1.0 | 0.0
    group: Tensor  # int64, 0 .. groups - 1
    lengths: Tensor
    greedy: Tensor

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        group_ids: Tensor,
        *,
        lengths: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
    ) -> Rewards:
        """rewards, greedy_rewards: [responses]; NaN in either = unscored. group_ids: int [responses], any
        numbers; groups may have any sizes. Raises ValueError for other shapes than the rewards', and for the
        first infinite reward."""
        if rewards.ndim != 1:
            raise ValueError(f"rewards must be [responses], not {list(rewards.shape)}")
        given = {"group_ids": group_ids, "lengths": lengths, "greedy_rewards": greedy_rewards}
        for name, tensor in given.items():
            if tensor is not None and tensor.shape != rewards.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, rewards {list(rewards.shape)}")
        greedy = torch.zeros_like(rewards) if greedy_rewards is None else greedy_rewards
        infinite = (rewards.isinf() | greedy.isinf()).nonzero()
        if len(infinite):
            raise ValueError(f"infinite reward at response {int(infinite[0])}: it has no advantage")
        scored = ~(rewards.isnan() | greedy.isnan())
        _, group = torch.unique(group_ids, return_inverse=True)
        return cls(
            reward=torch.where(scored, rewards.double(), 0.0),
            scored=scored.double(),
            group=group,
            lengths=torch.zeros_like(rewards) if lengths is None else lengths.double(),
            greedy=torch.where(scored, greedy.double(), 0.0),
        )

    def group_sum(self, values: Tensor) -> Tensor:
        """[responses]: the sum over each response's group. values: 0 where unscored."""
        return torch.zeros_like(self.reward).index_add(0, self.group, values)[self.group]

    def size(self) -> Tensor:
        """[responses]: scored responses in the group, at least 1."""
        return self.group_sum(self.scored).clamp(min=1)

    def flat(self) -> Tensor:
        """bool [responses]: all scored rewards of the group are exactly equal (or there are none)."""
        far = torch.full_like(self.reward, torch.inf)
        low = far.scatter_reduce(0, self.group, torch.where(self.scored > 0, self.reward, far), "amin")
        high = (-far).scatter_reduce(0, self.group, torch.where(self.scored > 0, self.reward, -far), "amax")
        return (low >= high)[self.group]

    def centred(self) -> Tensor:
        """[responses]: R - mean of the group; exactly 0 in a flat group and where unscored."""
        mean = self.group_sum(self.reward) / self.size()
        return torch.where(self.flat(), 0.0, self.reward - mean) * self.scored


class TokenRewards(NamedTuple):
    """Rewards of the scored active tokens of packed responses, in their order; [n] each.

    reward: float64, a response's at its last active token; a KL in the reward is taken from it at every token.
    value: float64, the critic's before the token; 0 without a critic. rows: int, each token's response.
    Masked tokens (tool output) are stepped over: what follows a token is the next active one.
    """

    reward: Tensor
    value: Tensor
    rows: Tensor

    def following(self, values: Tensor) -> Tensor:
        """[n]: what stands at the response's next token, 0 after its last one."""
        return torch.where(is_last(self.rows), 0.0, values.roll(-1))

    def sum_to_go(self, values: Tensor, discount: float = 1.0) -> Tensor:
        """float64 [n]: sum over k of discount^k values[t + k] inside a response.

        Doubling: after each round every entry holds the sum of twice as many terms. Linear but for a factor
        log2 of the longest response.
        """
        out, span, factor = values.double().clone(), 1, discount
        longest = int(torch.bincount(self.rows).max()) if len(self.rows) else 0
        while span < longest:
            same = self.rows[span:] == self.rows[:-span]
            out[:-span] += torch.where(same, factor * out[span:], 0.0)
            span, factor = 2 * span, factor * factor
        return out


def is_last(rows: Tensor) -> Tensor:
    """bool [n]: no later token is of the same response. rows: int [n], ascending."""
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[:-1] != rows[1:]
    return last


@part(
    "advantage",
    formula="A_i = (R_i - mean_group) / (std_group + 1e-6)",
    meaning="reward relative to its group, in units of the group's spread",
    compares_group=True,
)
def grpo(
    rewards: Rewards,
    *,
    std: Annotated[
        Literal["population", "bessel", "none"], Setting("what a group's centred rewards are divided by")
    ] = "population",
) -> Tensor:
    centred, size = rewards.centred(), rewards.size()
    if std == "none":
        return centred
    degrees = size if std == "population" else (size - 1).clamp(min=1)
    spread = (rewards.group_sum(centred.square()) / degrees).sqrt()
    return centred / (spread + STD_EPSILON)


@part(
    "advantage",
    formula="A_i = R_i - mean_group",
    meaning="reward relative to its group; hard and easy prompts weigh alike",
    compares_group=True,
)
def dr_grpo(rewards: Rewards) -> Tensor:
    return rewards.centred()


@part(
    "advantage",
    formula="A_i = R_i - mean_{j != i} R_j",
    meaning="leave-one-out baseline: unbiased, G / (G - 1) times dr_grpo",
    compares_group=True,
)
def rloo(rewards: Rewards) -> Tensor:
    size = rewards.size()
    return rewards.centred() * size / (size - 1).clamp(min=1)


@part(
    "advantage",
    formula="A_i = R_i - sum_group(|y| R) / sum_group(|y|)",
    meaning="length-weighted baseline, which has the least variance",
    compares_group=True,
)
def opo(rewards: Rewards) -> Tensor:
    lengths = rewards.lengths * rewards.scored
    baseline = rewards.group_sum(lengths * rewards.reward) / rewards.group_sum(lengths).clamp(min=1)
    return rewards.reward - baseline


@part(
    "advantage",
    formula="A_t = whiten over all active tokens of (R - kl_coef * sum_{i >= t} k1_i)",
    meaning="no group: the whole batch is the baseline",
    whitened=True,
    kl_to_go=True,
)
def reinforce_pp(rewards: Rewards) -> Tensor:
    return rewards.reward


@part(
    "advantage",
    formula="A_i = whiten over all active tokens of (R_i - mean_group)",
    meaning="group baseline, spread of the whole batch",
    compares_group=True,
    whitened=True,
)
def reinforce_pp_baseline(rewards: Rewards) -> Tensor:
    return rewards.centred()


@part(
    "advantage",
    formula="A_i = R_i - R(greedy response)",
    meaning="baseline: the reward of the greedy response to the prompt",
    needs={"greedy_rewards"},
)
def remax(rewards: Rewards) -> Tensor:
    return rewards.reward - rewards.greedy


@part(
    "advantage",
    formula="A_t = whiten(sum_k (gamma gae_lambda)^k delta_{t+k}), delta_t = R_t + gamma V_{t+1} - V_t",
    meaning="a critic's values are the baseline, token by token",
    needs={"values"},
    per_token=True,
    whitened=True,
)
def gae(
    tokens: TokenRewards,
    *,
    gamma: Annotated[float, Setting("discount of GAE per token", at_least=0.0, at_most=1.0)] = 1.0,
    gae_lambda: Annotated[float, Setting("lambda of GAE per token", at_least=0.0, at_most=1.0)] = 1.0,
) -> Tensor:
    """Generalised advantage estimation (1506.02438, Eq. 16). The value after the last token is 0."""
    delta = tokens.reward + gamma * tokens.following(tokens.value) - tokens.value
    return tokens.sum_to_go(delta, gamma * gae_lambda)


def whiten(
    values: Sequence[Tensor], counted: Sequence[Tensor], reduce_sum: SumReduce | None = None
) -> list[Tensor]:
    """Return (values - mean) / (std + 1e-6), taken over everything that is counted on all replicas; float64.

    values: [n] each, one tensor a micro-batch. counted: bool [n] each, or how often. reduce_sum: sums a small
    float64 vector over replicas, called twice (the variance is taken around the global mean, so large rewards
    lose no digits). All 0 where nothing is counted or everything is equal.
    """
    pairs = [(v.double(), c.double()) for v, c in zip(values, counted, strict=True)]
    reduce = reduce_sum or (lambda x: x)
    nothing = torch.zeros(2, dtype=torch.float64)
    sums = sum((torch.stack([(c * v).sum(), c.sum()]).cpu() for v, c in pairs), nothing)
    total, count = reduce(sums).tolist()
    mean = total / max(count, 1.0)
    squares = sum(((c * (v - mean).square()).sum().cpu() for v, c in pairs), nothing[0])
    std = (reduce(squares.reshape(1)).item() / max(count, 1.0)) ** 0.5
    if std <= _ROUNDING * abs(mean):
        return [torch.zeros_like(v) for v, _ in pairs]
    return [(v - mean) / (std + STD_EPSILON) for v, _ in pairs]


@torch.no_grad()
def advantage_metrics(*, rewards: Tensor, group_ids: Tensor) -> m.Metrics:
    """Return what the groups of this replica can teach; summed over data-parallel replicas. rewards, group_ids:
    [responses]."""
    batch = Rewards.of(rewards, group_ids)
    size = batch.group_sum(batch.scored)
    one_each = batch.scored / batch.size()  # adds up to 1 over the scored responses of a group
    return {
        "train/zero_variance_groups": m.mean_of(batch.flat(), one_each * (size > 1)),
        "train/groups_of_one": m.sum_of(one_each * (size == 1)),
        "train/unscored_responses": m.sum_of(1.0 - batch.scored),
    }
