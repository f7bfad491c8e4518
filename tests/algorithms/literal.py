"""The objectives once more, as slow float64 loops written from the papers' formulas, sharing no code.

`loss(recipe, batch, weights)` gives the value with an autograd graph to the float64 log-probabilities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms import Recipe
from tests.algorithms.batches import Ragged


def weight(mode: str, batch: Ragged, max_length: int) -> list[float]:
    """One weight per token, by counting."""
    mask = batch.mask.tolist()
    active = [sum(mask[t] for t in range(begin, end)) for begin, end in batch.spans]
    groups = batch.group_ids.tolist()
    live_groups = {g for g, n in zip(groups, active, strict=True) if n}
    responses = sum(n > 0 for n in active)
    out = [0.0] * len(mask)
    for i, (begin, end) in enumerate(batch.spans):
        in_group = sum(n for g, n in zip(groups, active, strict=True) if g == groups[i])
        for t in range(begin, end):
            if mask[t]:
                out[t] = {
                    "token_mean": 1 / sum(active),
                    "group_token_mean": 1 / (len(live_groups) * in_group),
                    "sequence_mean": 1 / (responses * active[i]),
                    "constant": 1 / (responses * max_length),
                }[mode]
    return out


def loss(recipe: Recipe, batch: Ragged, weights: list[float], logprobs: Tensor) -> Tensor:
    """logprobs: float64 [T], with gradient."""
    old, engine = batch.old_logprobs.double(), batch.engine_logprobs.double()
    reference, entropy = batch.ref_logprobs.double(), batch.entropy.double()
    total = logprobs.sum() * 0.0
    for i, (begin, end) in enumerate(batch.spans):
        tokens = [t for t in range(begin, end) if batch.mask[t]]
        if not tokens:
            continue
        advantage = float(batch.advantages[i])
        deltas = [logprobs[t] - old[t] for t in tokens]
        factors = corrections(recipe, [float(old[t] - engine[t]) for t in tokens])
        drift = -sum(float(d.detach()) for d in deltas) / len(tokens)
        if recipe.off_policy_delta is not None and advantage < 0 and drift > recipe.off_policy_delta:
            factors = [0.0] * len(tokens)
        terms = per_token(recipe, deltas, [logprobs[t] for t in tokens], advantage)
        for t, term, factor in zip(tokens, terms, factors, strict=True):
            term = factor * term
            if recipe.kl != "none" and recipe.kl_in == "loss":
                term = term + recipe.kl_coef * kl(recipe.kl, logprobs[t] - reference[t])
            total = total + weights[t] * (term - recipe.entropy_coef * entropy[t])
    return total


def per_token(recipe: Recipe, deltas: list[Tensor], logprobs: list[Tensor], advantage: float) -> list[Tensor]:
    """The loss at each active token of one response. deltas: logp - old."""
    mean = sum(deltas) / len(deltas)
    if recipe.surrogate == "gmpo":
        return [gmpo(recipe, deltas, advantage)] * len(deltas)
    if recipe.ratio == "sequence":  # GSPO's Eq. 5, differentiated through the mean
        ratios = [mean.exp()] * len(deltas)
    elif recipe.ratio == "sequence_token":  # GSPO-token's Eq. 14
        ratios = [mean.exp().detach() * (x - x.detach()).exp() for x in logprobs]
    else:
        ratios = [d.exp() for d in deltas]
    return [surrogate(recipe, r, x, advantage) for r, x in zip(ratios, logprobs, strict=True)]


def surrogate(recipe: Recipe, ratio: Tensor, logprob: Tensor, advantage: float) -> Tensor:
    r = float(ratio.detach())
    if recipe.surrogate == "sapo":
        tau = recipe.tau_positive if advantage > 0 else recipe.tau_negative
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantage
    low, high = 1 - recipe.clip_low, 1 + recipe.clip_high
    outside = (advantage > 0 and r > high) or (advantage < 0 and r < low)
    if recipe.surrogate == "cispo":
        return -min(max(r, low), high) * advantage * logprob
    if recipe.surrogate == "cispo_mask":
        return -(0 if outside else min(max(r, low), high)) * advantage * logprob
    if recipe.surrogate == "minirl":
        return -(0 if outside else r) * advantage * logprob
    assert recipe.surrogate == "clip"
    clipped = ratio if low <= r <= high else torch.tensor(min(max(r, low), high), dtype=torch.float64)
    objective = min(ratio * advantage, clipped * advantage, key=float)
    if recipe.dual_clip is not None and advantage < 0:
        bound = torch.tensor(recipe.dual_clip * advantage, dtype=torch.float64)
        objective = max(objective, bound, key=float)
    return -objective


def gmpo(recipe: Recipe, deltas: list[Tensor], advantage: float) -> Tensor:
    """-(prod_t |min(r_t A, clip(r_t, e^-low, e^high) A)|)^(1/|y|) sgn(A), |A| taken out of the product."""
    sign = (advantage > 0) - (advantage < 0)
    product = torch.ones((), dtype=torch.float64)
    for d in deltas:
        low, high = math.exp(-recipe.clip_low), math.exp(recipe.clip_high)
        clipped = (
            d.exp() if low <= float(d.exp()) <= high else torch.tensor(min(max(float(d.exp()), low), high))
        )
        product = product * (min(d.exp() * sign, clipped * sign, key=float).abs() if sign else d.exp())
    return -(product ** (1 / len(deltas))) * advantage


def kl(kind: str, x: Tensor) -> Tensor:
    """x: logp - ref."""
    if kind == "k1":
        return x
    if kind == "k2":
        return x**2 / 2
    k3 = (-x).exp() - 1 + x
    if kind == "k3":
        return k3
    return k3.detach() + x.detach() * (x - x.detach())


def corrections(recipe: Recipe, logs: list[float]) -> list[float]:
    """c_t of one response. logs: old - engine."""
    low, high = (recipe.settings.get(name) for name in ("correction_low", "correction_high"))
    n = len(logs)
    whole, mean = math.exp(sum(logs)), math.exp(sum(logs) / n)
    if recipe.correction == "none":
        return [1.0] * n
    if recipe.correction == "tis":
        return [min(math.exp(x), high) for x in logs]
    if recipe.correction in ("mis", "icepop"):
        return [math.exp(x) if low <= math.exp(x) <= high else 0.0 for x in logs]
    if recipe.correction == "sequence_tis":
        return [min(whole, high)] * n
    if recipe.correction == "sequence_mis":
        return [whole if low <= whole <= high else 0.0] * n
    assert recipe.correction == "geometric_mis"
    return [mean if low <= mean <= high else 0.0] * n
