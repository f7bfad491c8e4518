"""What the routers' counts say: how far live routing is from the given one, and how the experts are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCounts:
    """What one router saw in a pass, padding left out; tensors stay on the device.

    routes: rows with a given route, that is (token, layer) pairs. changed: those whose live top-k is another set.
    tokens: how many there were. entropy: sum over all tokens of the router's distribution. load: int64 [experts],
    tokens sent to each.
    """

    routes: Tensor
    changed: Tensor
    tokens: Tensor
    entropy: Tensor
    load: Tensor

    @classmethod
    def zeros(cls, experts: int, device: torch.device) -> LayerCounts:
        routes, changed, tokens = torch.zeros(3, dtype=torch.int64, device=device)
        load = torch.zeros(experts, dtype=torch.int64, device=device)
        return cls(routes, changed, tokens, torch.zeros((), device=device), load)


@dataclass(frozen=True)
class RoutingCounts:
    """Sums over all ranks of one pass. moe_layers: their 0-based numbers, the order of every [layers] vector.

    routes, changed, tokens, entropy: [layers], see `LayerCounts`. load: [layers, experts].
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
    rows = vector[:-2].view(len(moe_layers), 4 + experts)
    routes, changed, tokens, entropy = rows[:, :4].unbind(1)
    known, differing = vector[-2:].tolist()
    return RoutingCounts(moe_layers, routes, changed, tokens, entropy, rows[:, 4:], known, differing)


def pack_counts(
    moe_layers: tuple[int, ...],
    experts: int,
    by_layer: Mapping[int, LayerCounts],
    known_tokens: Tensor,
    changed_tokens: Tensor,
) -> Tensor:
    """Return a flat float64 vector, zero for the layers of other ranks."""
    vector = torch.zeros(len(moe_layers) * (4 + experts) + 2, dtype=torch.float64, device=known_tokens.device)
    rows = vector[:-2].view(len(moe_layers), 4 + experts)
    for n, layer in enumerate(moe_layers):
        if (c := by_layer.get(layer)) is not None:
            rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3] = c.routes, c.changed, c.tokens, c.entropy
            rows[n, 4:] = c.load
    vector[-2], vector[-1] = known_tokens, changed_tokens
    return vector
