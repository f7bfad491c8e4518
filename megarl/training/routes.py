"""A step's routes from the engine to the ranks that replay them: checked by the leader, cut by pipeline stage, and sent
to nobody who doesn't compute the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.megatron.policy import Policy
from megarl.records import Group, Sample
from megarl.routing.store import RouteStore
from megarl.routing.trace import RouteShape, RoutingError, check_trace, stale_rows

# of each sample: its id, experts [tokens - 1, layers, top_k], stale rows [tokens - 1]
Parts = list[tuple[str, np.ndarray, np.ndarray]]


def share_groups(policy: Policy, sampled: list[Group] | None, store: RouteStore | None) -> list[Group]:
    """The leader's groups on every rank of the replica, their routes in each rank's `store` (None: they have none).
    Collective. Raises RoutingError, on every rank of the replica, for routes that can't be replayed."""
    groups = policy.groups
    if store is None:
        return groups.share_in_replica(sampled)
    shape = route_shape(policy)
    problem, parts = None, []
    if sampled is not None:
        try:
            parts = [check_routes(s, shape) for g in sampled for s in g.samples]
        except RoutingError as error:
            problem = str(error)
        sampled = [replace(g, samples=tuple(replace(s, routes=None) for s in g.samples)) for g in sampled]
    problem, shared = groups.share_in_replica((problem, sampled))
    if problem is not None:
        raise RoutingError(problem)
    columns = groups.gather_in_replica(local_columns(policy))
    cut: list[Parts] | None = None
    if groups.is_leader:
        cut = [[(name, experts[:, own], stale) for name, experts, stale in parts] for own in columns]
    for name, experts, stale in groups.scatter_in_replica(cut):
        store.add(name, experts, stale)
    return shared  # type: ignore[return-value]


def check_routes(sample: Sample, shape: RouteShape) -> tuple[str, np.ndarray, np.ndarray]:
    trace = check_trace(sample, shape)
    return sample.sample_id, trace.experts.astype(shape.dtype, copy=False), stale_rows(sample, trace)


def route_shape(policy: Policy) -> RouteShape:
    architecture = policy.architecture
    return RouteShape(architecture.moe_layers, architecture.num_experts, architecture.top_k)


def local_columns(policy: Policy) -> Sequence[int]:
    """Which of a trace's layers this rank computes, in model order of its chunks."""
    assert policy.replay is not None
    place = {layer: n for n, layer in enumerate(policy.architecture.moe_layers)}
    return [place[layer] for chunk in policy.replay.layers for layer in chunk]
