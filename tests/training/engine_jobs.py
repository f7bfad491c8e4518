"""Jobs on several ranks with scripted engines: who has which engine, who gives it weights, who gets which routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.errors import UserError
from megarl.megatron.groups import initialize
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout
from megarl.records import Prompt
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import sample_groups
from megarl.rollout.sync import SyncFailed
from megarl.routing.store import RouteStore
from megarl.routing.trace import RoutingError
from megarl.training.engines import connect_engine, sync_weights
from megarl.training.routes import share_groups
from tests.megatron.jobs import build, join
from tests.rollout.scripted import (
    CONTEXT,
    ByLength,
    ScriptedEngine,
    ScriptedSettings,
    SharedSettings,
    context_of,
)


def connect_job(tensor: int) -> dict[str, Any]:
    """What this rank has of engines that each replica starts for itself, and of servers that all share; and what it is
    told when the engine of the last rank alone does not start."""
    groups = initialize(Layout(tensor=tensor), Platform.detect("cpu"), seed=0)
    found: dict[str, Any] = {}
    for name, settings in (("own", ScriptedSettings()), ("shared", SharedSettings())):
        handle = connect_engine(groups, settings, CONTEXT)
        urls = None if handle.engine is None else handle.engine.urls()
        found[name] = (urls, handle.owns)
        handle.close()
    broken = groups.replica_index == groups.replica_count - 1
    try:
        connect_engine(groups, ScriptedSettings(fails=("no_start",) if broken else ()), CONTEXT)
        found["refused"] = None
    except UserError as error:
        found["refused"] = str(error)
    return found


def sync_job(shared: bool) -> dict[str, Any]:
    """A sync on two replicas: metrics, how many tensors this rank went through, and the calls that its engine saw; and
    what is told where every engine loses a bit."""
    groups = initialize(Layout(), Platform.detect("cpu"), seed=0)
    read: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            read.append(name)
            yield name, torch.ones(4)

    handle = connect_engine(groups, SharedSettings() if shared else ScriptedSettings(), CONTEXT)
    metrics = sync_weights(handle, tensors(), groups, version=7)
    assert isinstance(handle.client, ScriptedEngine)
    lossy = connect_engine(groups, ScriptedSettings(fails=("flipped_bit",)), CONTEXT)
    try:
        sync_weights(lossy, tensors(), groups, version=8)
        told = None
    except SyncFailed as error:
        told = str(error)
    return {"metrics": metrics, "read": read[:3], "calls": handle.client.calls, "told": told}


def share_job(checkpoint: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """A round of two prompts with routes: by sample, the experts that the engine gave (on the leader), those that this
    rank keeps, and the layers it computes; and what is told where the engine leaves routes out."""
    groups = join(layout)
    policy, _ = build(checkpoint, layout, groups)
    prompts = [Prompt(f"p/{n}", np.arange(2 + n), "", "exact", {}) for n in range(2)]
    context = context_of(checkpoint, checkpoint)
    sampling = SamplingParams(max_new_tokens=5)

    def sample(*fails: str) -> list[Any] | None:
        if not groups.is_leader:
            return None
        engine = ScriptedEngine(context, fails)  # type: ignore[arg-type]
        engine.start()
        options: dict[str, Any] = {"seed": 0, "step": 0, "decode": str, "return_routes": True}
        return sample_groups(engine, ByLength(), prompts, group_size=2, sampling=sampling, **options)

    sampled, store = sample(), RouteStore()
    shared = share_groups(policy, sampled, store)
    found = {
        "sent": {s.sample_id: s.routes.experts for g in sampled or () for s in g.samples},
        "kept": {name: np.array(experts) for name, (experts, _) in store._kept.items()},
        "layers": [n for chunk in policy.replay.layers for n in chunk],
        "samples": [(s.sample_id, s.response_ids.tolist(), s.routes) for g in shared for s in g.samples],
    }
    try:
        share_groups(policy, sample("no_routes"), RouteStore())
        found["told"] = None
    except RoutingError as error:
        found["told"] = str(error)
    return found
