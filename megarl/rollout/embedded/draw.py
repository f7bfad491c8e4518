"""Picking tokens: one uniform number for each, put through the inverse of the cumulative distribution.

A draw is then a function of (seed, position in the response, distribution) and of nothing else: not of the
batch's size or order, nor of what was drawn before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Filters:
    """Bounds on the draw, one for each row: top_p, min_p float [rows], top_k int64 [rows] (-1: all)."""

    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return float64 [count] in [0, 1): number n decides token n of the response. Philox, keyed by the seed."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128)).random(count)


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, filters: Filters | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row, and tell its log-probability.

    logits: float32 [rows, vocabulary]. temperature: float32 [rows], 0 = the most probable token.
    uniform: float64 [rows]. filters: None when no row bounds its draw.
    Returns tokens int64 [rows] and log-probabilities float32 [rows]: those of the whole distribution at the
    row's temperature (temperature 1 for greedy rows), before any filter, as SGLang reports them.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    probabilities = logprobs.exp()
    if filters is not None:
        probabilities = keep(probabilities, filters)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    target = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True)
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def keep(probabilities: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the probabilities [rows, vocabulary] with what the filters exclude set to zero, not renormalised.

    All three look at the same full distribution (SGLang's joint order): the top_k most probable tokens, of
    them the smallest head whose probability reaches top_p, of them those of min_p times the greatest or more.
    """
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    top_k = filters.top_k.masked_fill(filters.top_k < 1, ordered.shape[-1])
    allowed = (rank < top_k[:, None]) & (before < filters.top_p[:, None])
    allowed &= ordered >= filters.min_p[:, None] * ordered[:, :1]
    allowed[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(1, index, ordered * allowed)
