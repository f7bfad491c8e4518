"""Route traces as they arrive: checked, and the rows found that other weights made than the tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.records import RouteTrace, Sample, WeightSpan

LIVE = -1  # in place of an expert: this token's routing at this layer is the router's own


class RoutingError(RuntimeError):
    """Routes that can't be replayed. The message names the sample and, where there is one, the layer."""


@dataclass(frozen=True)
class RouteShape:
    """What a trace must look like. moe_layers: 0-based decoder layers with experts, in order."""

    moe_layers: tuple[int, ...]
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer type that holds an expert's number."""
        return np.min_scalar_type(max(self.experts - 1, 0))


def check_trace(sample: Sample, shape: RouteShape) -> RouteTrace:
    """Return the sample's trace, if it can be believed. Raises RoutingError naming sample and layer otherwise."""
    who, trace = f"sample {sample.sample_id!r}", sample.routes
    if trace is None:
        raise RoutingError(f"{who}: the engine returned no routes")
    experts = trace.experts
    expected = (sample.tokens - 1, len(shape.moe_layers), shape.top_k)
    if experts.shape != expected:
        raise RoutingError(
            f"{who}: routes have the shape {list(experts.shape)}, expected {list(expected)} "
            "([tokens - 1, MoE layers, top-k])"
        )
    if zlib.crc32(np.ascontiguousarray(experts).tobytes()) != trace.checksum:
        raise RoutingError(f"{who}: the routes were corrupted on their way (checksum)")
    if len(experts):
        outside = (experts >= shape.experts) | (experts < 0)
        if outside.any():
            row, layer, _ = map(int, np.argwhere(outside)[0])
            raise RoutingError(
                f"{who}, layer {shape.moe_layers[layer]}: expert {int(experts[row, layer].max())} at token {row}, but "
                f"the layer has {shape.experts}"
            )
        ordered = np.sort(experts, axis=2)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
        if twice.any():
            row, layer = map(int, np.argwhere(twice)[0])
            raise RoutingError(
                f"{who}, layer {shape.moe_layers[layer]}: the same expert twice for token {row}: "
                f"{experts[row, layer].tolist()}"
            )
    known = {span.version for span in sample.spans}
    for span in trace.spans:
        if span.version not in known:
            raise RoutingError(
                f"{who}: the routes are of weight version {span.version}, the tokens of {sorted(known)}"
            )
    return trace


def stale_rows(sample: Sample, trace: RouteTrace) -> np.ndarray:
    """Return bool [tokens - 1]: rows made by other weights than those that sampled the token they lead to.

    After a weight update in mid-generation the engine may have run the tokens so far through the new weights. Row
    `p + j - 1` of a prompt of p tokens leads to response token j; the prompt's rows before belong to the first.
    """
    n = len(sample.response_ids)
    sampled, made = _versions(sample.spans, n), _versions(trace.spans, n)
    differs = sampled != made
    prompt = len(sample.prompt.token_ids)
    first = differs[:1] if n else np.zeros(1, bool)
    return np.concatenate([np.repeat(first, prompt - 1), differs])


def _versions(spans: Sequence[WeightSpan], tokens: int) -> np.ndarray:
    versions = np.full(tokens, np.iinfo(np.int64).min)
    for span in spans:
        versions[span.start : span.end] = span.version
    return versions
