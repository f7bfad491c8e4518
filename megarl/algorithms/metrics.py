"""Metrics that can be added up: over micro-batches, over ranks, exactly, and without asking the device meanwhile.

A metric is kept as what its final value is made of (a mean as numerator and denominator, a quantile as a
histogram), so that a mean over ranks is weighted by counts and never a mean of means:

    per micro-batch     LossOutput.metrics                              tensors, no host synchronisation
    over micro-batches  combine([...])                                  one optimizer step
    over its steps      average_steps([...])                            one rollout
    over ranks          reduce_metrics(m, sum_ranks=..., max_ranks=...)  two small collectives over DP x CP
    to be logged        finalize(m) -> {"train/pg_loss": 0.01, ...}      one copy to the host
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BINS = 1023
_SCALE, _LARGEST = 1e-5, 20.0
_WIDTH = 2 * math.asinh(_LARGEST / _SCALE) / (BINS - 1)
QUANTILES = {"p01": 0.01, "p50": 0.50, "p99": 0.99}


class PartialMetric(NamedTuple):
    """One rank's or micro-batch's part of a metric.

    kind: how `value`, float64 [k], is added up and finished.

    sum: [x]. loss: [x], a sum within an optimizer step and a mean over steps. mean: [sum of w x, sum of w].
    moments, ess: [sum of w x, sum of w x^2, sum of w]. max: [x]. min: [-x]. quantiles: histogram of log x, [BINS].
    """

    kind: str
    value: Tensor


Metrics = dict[str, PartialMetric]


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def sum_of(values: Tensor) -> PartialMetric:
    """Return the sum of all values, [n]."""
    return PartialMetric("sum", _total(values).reshape(1))


def loss_of(value: Tensor) -> PartialMetric:
    """Return a scalar part of the loss."""
    return PartialMetric("loss", value.detach().double().reshape(1))


def mean_of(values: Tensor, weights: Tensor) -> PartialMetric:
    """Return the weighted mean. values (numbers or bool), weights: [n]."""
    return PartialMetric("mean", torch.stack([_total(values * weights), _total(weights)]))


def moments_of(values: Tensor, weights: Tensor) -> PartialMetric:
    """Return the weighted mean and standard deviation, logged as NAME_mean and NAME_std."""
    return PartialMetric("moments", _moments(values, weights))


def effective_size_of(values: Tensor, weights: Tensor) -> PartialMetric:
    """Effective sample size of importance weights `values`, as a share: (sum w x)^2 / (sum w * sum w x^2)."""
    return PartialMetric("ess", _moments(values, weights))


def largest_of(values: Tensor, among: Tensor) -> PartialMetric:
    """Return the largest value where `among`, bool [n]."""
    return PartialMetric("max", _largest(values, among))


def smallest_of(values: Tensor, among: Tensor) -> PartialMetric:
    """Return the smallest value where `among`, bool [n]."""
    return PartialMetric("min", _largest(-values, among))


def quantiles_of(log_values: Tensor, weights: Tensor) -> PartialMetric:
    """Return the weighted quantiles of exp(log_values), logged as NAME_p01, NAME_p50, NAME_p99.

    Bins are even in asinh(log x / 1e-5): a logarithm read off them is right to 1.5% of itself, or to 1.5e-7
    near 0 (ratio 1), up to +-20.
    """
    # in place: of all metrics this one would need most memory
    place = log_values.float().nan_to_num().clamp_(-_LARGEST, _LARGEST).div_(_SCALE).asinh_().div_(_WIDTH)
    bins = place.round_().add_(BINS // 2).int()
    del place
    zeros = torch.zeros(BINS, dtype=torch.float64, device=log_values.device)
    return PartialMetric("quantiles", zeros.index_add(0, bins, weights.double()))


def _moments(values: Tensor, weights: Tensor) -> Tensor:
    weighted = values * weights
    return torch.stack([_total(weighted), _total(weighted * values), _total(weights)])


def _largest(values: Tensor, among: Tensor) -> Tensor:
    floor = torch.full((1,), -math.inf, dtype=torch.float64, device=values.device)
    if values.numel() == 0:
        return floor
    return torch.where(among, values, -math.inf).amax().double().reshape(1)


def combine(parts: Iterable[Metrics]) -> Metrics:
    """Return the metrics of several micro-batches as those of one. Names that only some have are kept."""
    out: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name not in out:
                out[name] = metric
                continue
            join = torch.maximum if _is_extreme(metric) else torch.add
            out[name] = PartialMetric(metric.kind, join(out[name].value, metric.value))
    return out


def average_steps(parts: Sequence[Metrics]) -> Metrics:
    """Return the metrics of several optimizer steps as those of one: combined, with the mean of their losses."""
    return {
        name: PartialMetric(m.kind, m.value / len(parts)) if m.kind == "loss" else m
        for name, m in combine(parts).items()
    }


def reduce_metrics(
    metrics: Metrics, *, sum_ranks: Callable[[Tensor], Tensor], max_ranks: Callable[[Tensor], Tensor]
) -> Metrics:
    """Return the metrics of all ranks. Every rank holds the same names; each callable gets one flat float64 vector.

    sum_ranks, max_ranks: return the element-wise sum, maximum over data- and context-parallel ranks.
    """
    out = dict(metrics)
    for extreme, reduce in ((False, sum_ranks), (True, max_ranks)):
        names = sorted(name for name, metric in metrics.items() if _is_extreme(metric) == extreme)
        if not names:
            continue
        flat = reduce(torch.cat([metrics[name].value for name in names]))
        parts = flat.split([len(metrics[name].value) for name in names])
        out |= {
            name: PartialMetric(metrics[name].kind, part) for name, part in zip(names, parts, strict=True)
        }
    return out


def finalize(metrics: Metrics) -> dict[str, float]:
    """Return the numbers to log. A name without any data (a mean over no tokens) is left out rather than made up."""
    if not metrics:
        return {}
    flat = torch.cat([metric.value for metric in metrics.values()]).tolist()
    out: dict[str, float] = {}
    start = 0
    for name, metric in metrics.items():
        values = flat[start : start + len(metric.value)]
        start += len(values)
        out |= {name + suffix: x for suffix, x in FINISH[metric.kind](values).items()}
    return out


def _is_extreme(metric: PartialMetric) -> bool:
    return metric.kind in ("max", "min")


def _finish_moments(values: list[float]) -> dict[str, float]:
    first, second, weight = values
    if weight == 0:
        return {}
    mean = first / weight
    return {"_mean": mean, "_std": math.sqrt(max(second / weight - mean**2, 0.0))}


def _finish_quantiles(histogram: list[float]) -> dict[str, float]:
    total = math.fsum(histogram)
    out: dict[str, float] = {}
    for name, share in QUANTILES.items() if total > 0 else ():
        below = 0.0
        for place, weight in enumerate(histogram):
            below += weight
            if below >= share * total * (1 - 1e-12) and weight > 0:
                out[f"_{name}"] = math.exp(_SCALE * math.sinh((place - BINS // 2) * _WIDTH))
                break
    return out


FINISH: Mapping[str, Callable[[list[float]], dict[str, float]]] = {
    "sum": lambda v: {"": v[0]},
    "loss": lambda v: {"": v[0]},
    "mean": lambda v: {"": v[0] / v[1]} if v[1] else {},
    "moments": _finish_moments,
    "ess": lambda v: {"": v[0] ** 2 / (v[1] * v[2])} if v[1] * v[2] else {},
    "max": lambda v: {"": v[0]} if v[0] != -math.inf else {},
    "min": lambda v: {"": -v[0]} if v[0] != -math.inf else {},
    "quantiles": _finish_quantiles,
}
