"""Advantages that differ from token to token: a critic's (GAE), or with the KL to the reference taken from
the reward.

They need passes over the whole responses (old, reference, critic), so they are made after those and before
the batch is cut for context parallelism: every response here is whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages import compute_advantages, refuse_infinite, whiten
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses, SumReduce


class Gae(NamedTuple):
    """advantages, returns: float32 [T], 0 where masked; returns are what the critic should say."""

    advantages: Tensor
    returns: Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    token_rewards: Tensor | None = None,
) -> Gae:
    """Generalised advantage estimation (1506.02438, Eq. 16) over the active tokens of packed responses.

    rewards: [R], given at the last active token of a response; NaN = unscored, its advantages and returns are
    0. values: [T], the critic's value before each token. mask: bool [T]; masked tokens (tool output) are
    stepped over: what follows an active token is the next active one. cu_seqlens: [R + 1]. token_rewards:
    [T], added at each token. The value after the last token is 0. Linear in T but for a factor log2 of the
    longest response. Raises ValueError for a misshapen argument and for infinite rewards.
    """
    refuse_infinite(rewards)
    responses = Responses.of(mask, cu_seqlens)
    scored = responses.spread((~rewards.isnan()).float()) > 0
    active = (mask & scored).nonzero().squeeze(1)
    rows = responses.rows[active]
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[:-1] != rows[1:]

    value = responses.clean(values, "values")[active].double()
    following = torch.where(last, 0.0, value.roll(-1))
    reward = torch.where(last, responses.spread(rewards.nan_to_num())[active].double(), 0.0)
    if token_rewards is not None:
        reward = reward + responses.clean(token_rewards, "token_rewards")[active].double()
    advantage = _sum_to_go(reward + gamma * following - value, rows, gamma * gae_lambda)

    out = torch.zeros(2, len(mask), dtype=torch.float32, device=mask.device)
    out[0, active], out[1, active] = advantage.float(), (advantage + value).float()
    return Gae(out[0], out[1])


def token_advantages(
    recipe: Recipe,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    reduce_sum: SumReduce | None = None,
) -> Gae:
    """The recipe's advantages at every token, with its critic and with the KL in the reward where it has
    them.

    Shapes as in `compute_advantages` and `gae`, of everything this replica sampled. old_logprobs,
    ref_logprobs: [T], needed by a KL in the reward. values: [T], needed by a critic. GAE's advantages are
    whitened over the active tokens of the global batch; its returns are not. Without a critic, returns are 0.
    Raises ValueError for a missing argument.
    """
    responses = Responses.of(mask, cu_seqlens)
    penalty = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    if recipe.has_reward_kl:
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError(f"{recipe.name}: old_logprobs and ref_logprobs are needed by kl_in: reward")
        old, reference = (
            responses.clean(old_logprobs, "old_logprobs"),
            responses.clean(ref_logprobs, "ref_logprobs"),
        )
        penalty = -recipe.kl_coef * kl_estimate(recipe.kl, old, reference).detach()
    if not recipe.has_token_advantages:
        advantages = compute_advantages(
            recipe,
            rewards=rewards + responses.sum(penalty),
            group_ids=group_ids,
            lengths=responses.local,
            greedy_rewards=greedy_rewards,
            reduce_sum=reduce_sum,
        )
        return Gae(responses.per_token(advantages, "advantages"), torch.zeros_like(penalty))

    if values is None and recipe.needs_critic:
        raise ValueError(f"{recipe.name}: values are needed by advantage 'gae'")
    # REINFORCE++ is the case without a critic: undiscounted reward to go
    raw = gae(
        rewards=rewards,
        values=penalty.new_zeros(len(mask)) if values is None else values,
        mask=mask,
        cu_seqlens=cu_seqlens,
        gamma=1.0 if recipe.gamma is None else recipe.gamma,
        gae_lambda=1.0 if recipe.gae_lambda is None else recipe.gae_lambda,
        token_rewards=penalty,
    )
    counted = responses.clean(responses.spread((~rewards.isnan()).float()), "rewards")
    white = whiten(raw.advantages, counted, reduce_sum) * counted
    return Gae(white.float(), raw.returns if recipe.needs_critic else torch.zeros_like(penalty))


def _sum_to_go(values: Tensor, rows: Tensor, discount: float) -> Tensor:
    """float64 [n]: sum over k of discount^k values[t + k] inside a row. rows: [n], ascending.

    Doubling: after each round every entry holds the sum of twice as many terms.
    """
    out, span, factor = values.clone(), 1, discount
    longest = int(torch.bincount(rows).max()) if len(rows) else 0
    while span < longest:
        ahead = torch.where(rows[span:] == rows[:-span], factor * out[span:], 0.0)
        out[:-span] += ahead
        span, factor = 2 * span, factor * factor
    return out
