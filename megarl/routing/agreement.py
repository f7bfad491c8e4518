"""What the routers' counts say: how far live routing is from the given one, and how the experts are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingCounts:
    """Sums over all ranks of one pass. moe_layers: their 0-based numbers, the order of every [layers] vector.

    routes, changed, tokens, entropy: [layers], see `replay.LayerCounts`. load: [layers, experts].
    known_tokens, changed_tokens: tokens with a given route, and those that differ in any layer.
    """

    moe_layers: tuple[int, ...]
    routes: Tensor
    changed: Tensor
    tokens: Tensor
    entropy: Tensor
    load: Tensor
    known_tokens: float
    changed_tokens: float


def routing_disagreement(counts: RoutingCounts) -> float:
    """Return the share of (token, layer) routes where the live top-k is another set than the given one."""
    return float(counts.changed.sum() / counts.routes.sum().clamp(min=1))


def routing_metrics(first: RoutingCounts, last: RoutingCounts) -> dict[str, float]:
    """Return a rollout's routing metrics. first, last: the counts of its first and last mini-batch (before, and after
    all but one update)."""
    load = last.load.double()
    spread = load.std(1, correction=0) / load.mean(1).clamp(min=1e-9)
    metrics = {
        "routing/load_cv": float(spread.mean()),
        "routing/dead_experts": float((load == 0).sum()),
        "routing/entropy": float(last.entropy.sum() / last.tokens.sum().clamp(min=1)),
    }
    if float(first.routes.sum()):
        metrics |= {
            "routing/flip_share_first": routing_disagreement(first),
            "routing/flip_share_last": routing_disagreement(last),
        }
        metrics["routing/token_flip_share"] = last.changed_tokens / max(last.known_tokens, 1)
        shares = last.changed / last.routes.clamp(min=1)
        for layer, share in zip(last.moe_layers, shares.tolist(), strict=True):
            metrics[f"routing/flip_share/layer_{layer}"] = share
    return metrics


def summed(moe_layers: tuple[int, ...], vector: Tensor, experts: int) -> RoutingCounts:
    """Unpack the flat float64 vector that `pack_counts` makes, after it was summed over ranks."""
    n = len(moe_layers)
    rows, tail = vector[: n * (4 + experts)].view(n, 4 + experts), vector[n * (4 + experts) :]
    return RoutingCounts(
        moe_layers,
        rows[:, 0],
        rows[:, 1],
        rows[:, 2],
        rows[:, 3],
        rows[:, 4:],
        float(tail[0]),
        float(tail[1]),
    )


def pack_counts(
    moe_layers: tuple[int, ...],
    experts: int,
    by_layer: dict[int, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    known_tokens: Tensor,
    changed_tokens: Tensor,
) -> Tensor:
    """Return a flat float64 vector, zero for the layers of other ranks. by_layer: routes, changed, tokens, entropy,
    load."""
    vector = torch.zeros(len(moe_layers) * (4 + experts) + 2, dtype=torch.float64, device=known_tokens.device)
    rows = vector[:-2].view(len(moe_layers), 4 + experts)
    for n, layer in enumerate(moe_layers):
        if layer in by_layer:
            routes, changed, tokens, entropy, load = by_layer[layer]
            rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3] = routes, changed, tokens, entropy
            rows[n, 4:] = load
    vector[-2], vector[-1] = known_tokens, changed_tokens
    return vector
