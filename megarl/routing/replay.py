"""Replaying routes in megatron-core: the one file of this room that knows it.

Each router of this rank gets a `LayerReplay`, a `RouterReplay` of megatron-core whose choice between forward and
recompute is made by whether autograd is running, so that it holds in every schedule. Only expert numbers are
replayed: gate values come from the live logits, and the router keeps its gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megarl.routing.agreement import LayerCounts
from megarl.routing.trace import LIVE, RoutingError

Mode = Literal["live", "record", "observe", "replay"]


@dataclass(frozen=True)
class RecordedRoutes:
    """What this rank's routers chose for one micro-batch. layers: [chunk][layer], [this rank's tokens, top_k]."""

    layers: list[list[Tensor]]


@dataclass(frozen=True)
class GivenRoutes:
    """Routes of one micro-batch by input position. load: gives int16 [tokens, this rank's MoE layers in model order,
    top_k], an expert's number or LIVE; called when the micro-batch's forward pass begins."""

    load: Callable[[], Tensor]


Routes = RecordedRoutes | GivenRoutes


class LayerReplay(RouterReplay):
    """What one router replays, records and counts. layer: its 0-based decoder layer."""

    def __init__(self, router: TopKRouter) -> None:
        # Not the parent's: it would enter itself into a list of the process that nothing ever empties.
        self.router, self.layer = router, router.layer_number - 1
        router.router_replay = self
        self.mode: Mode = "live"
        self.counting = False
        self.clear()

    def clear(self) -> None:
        """Forget targets, records and counts."""
        self.target_topk_idx: Tensor | None = None
        self.real: Tensor | None = None
        self.replay_backward_list: Any = deque()
        self.forwards = self.recomputes = 0
        self.records: list[Tensor] = []
        self.known_rows: list[Tensor] = []
        self.changed_rows: list[Tensor] = []
        self.counts: LayerCounts | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the top-k's values and expert numbers, [tokens, top_k] each. scores: [tokens, experts]."""
        assert default_compute_topk is not None
        values, live = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.mode == "live":
            return values, live
        if self.mode == "record":
            self.forwards += 1
            small = torch.uint8 if scores.shape[1] <= 256 else torch.int16
            self.records.append(live.detach().to(small).cpu())
            return values, live
        again = torch._C._current_graph_task_id() != -1  # inside backward: activation recompute
        target = self._target(again, len(scores)).to(scores.device, torch.long)
        known = target[:, :1] != LIVE
        chosen = live if self.mode == "observe" else torch.where(known, target, live)
        if self.counting and not again:
            self._count(scores, live, target, chosen)
        return (values, live) if self.mode == "observe" else (scores.gather(1, chosen), chosen)

    def _target(self, again: bool, tokens: int) -> Tensor:
        if again:
            self.recomputes += 1
            target = self.replay_backward_list.popleft() if self.replay_backward_list else None
        else:
            self.forwards += 1
            target, self.target_topk_idx = self.target_topk_idx, None
        if target is None or len(target) != tokens:
            what = "no routes are left" if target is None else f"there are {len(target)} rows of routes"
            raise RoutingError(f"layer {self.layer}: {what} for the router's {tokens} tokens")
        return target

    @torch.no_grad()
    def _count(self, scores: Tensor, live: Tensor, target: Tensor, chosen: Tensor) -> None:
        """Add to the counts. target: the given experts or LIVE; chosen: those that are used."""
        if self.counts is None:
            self.counts = LayerCounts.zeros(scores.shape[1], scores.device)
        counts, real = self.counts, self.real
        assert real is not None
        known = (target[:, 0] != LIVE) & real
        here = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, live, True)
        changed = known & ~here.gather(1, target.clamp(min=0)).all(dim=1)
        counts.routes += known.sum()
        counts.changed += changed.sum()
        self.known_rows.append(known)
        self.changed_rows.append(changed)
        counts.load.index_add_(0, chosen.flatten(), real.long().repeat_interleave(chosen.shape[1]))
        counts.entropy += (_entropy(scores, self.router) * real).sum()
        counts.tokens += real.sum()


def _entropy(scores: Tensor, router: TopKRouter) -> Tensor:
    """Return the entropy [tokens] of the router's distribution over all experts."""
    if router.score_function == "softmax" and not router.config.moe_router_pre_softmax:
        probabilities = scores.float().softmax(1)
    else:
        probabilities = torch.nn.functional.normalize(scores.float(), p=1.0, dim=1)
    return torch.special.entr(probabilities).sum(1)


class Replay:
    """All routers of this rank's model chunks, in model order.

    recomputed: whether activation recompute runs the routers once more in backward.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], recomputed: bool) -> None:
        self.recomputed = recomputed
        self.routers = [
            [LayerReplay(module) for module in chunk.modules() if isinstance(module, TopKRouter)]
            for chunk in chunks
        ]

    @property
    def layers(self) -> list[list[int]]:
        """Return the 0-based decoder layers of each chunk's routers."""
        return [[router.layer for router in chunk] for chunk in self.routers]

    def _all(self) -> list[LayerReplay]:
        return [router for chunk in self.routers for router in chunk]

    @contextmanager
    def recording(self) -> Iterator[list[RecordedRoutes]]:
        """Let routers choose for themselves and keep what they chose. Yields a list that, after the block, holds the
        routes of each micro-batch in turn."""
        with self._mode("record"):
            kept: list[RecordedRoutes] = []
            yield kept
            calls = {len(router.records) for router in self._all()}
            if len(calls) > 1:
                raise RoutingError(f"routers were called {sorted(calls)} times in one recording")
            for n in range(calls.pop() if calls else 0):
                kept.append(RecordedRoutes([[r.records[n] for r in chunk] for chunk in self.routers]))

    @contextmanager
    def replaying(self, mode: Mode, count: int, *, backward: bool, counted: bool = False) -> Iterator[None]:
        """Let routers follow (`replay`), or only be compared with (`observe`), the routes of `count` micro-batches. At
        the end every route has been used exactly once in forward, and once more where it is recomputed in backward;
        else RoutingError names the layer.

        counted: how live routing differs, and how the experts are used, is counted for `take_counts`.
        """
        with self._mode(mode, counted):
            self._expected = (count, count if backward and self.recomputed else 0)
            yield
            for router in self._all():
                if (used := (router.forwards, router.recomputes)) != self._expected:
                    raise RoutingError(
                        f"layer {router.layer}: the routes of {count} micro-batches were used {used[0]} times in "
                        f"forward and {used[1]} times in recompute, expected {self._expected[0]} and "
                        f"{self._expected[1]}"
                    )

    @contextmanager
    def _mode(self, mode: Mode, counting: bool = False) -> Iterator[None]:
        for router in self._all():
            router.clear()
            router.mode, router.counting = mode, counting
        try:
            yield
        finally:
            for router in self._all():
                router.mode = "live"
                router.target_topk_idx = None
                router.replay_backward_list.clear()
                router.records = []

    def begin(
        self, chunk: int, routes: Routes | None, take: Callable[[Tensor], Tensor], real: Tensor
    ) -> None:
        """Hand a chunk's routers their routes before its forward pass on a micro-batch.

        take: [tokens, ...] by input position -> [this rank's tokens, ...]. real: bool [this rank's tokens], False for
        padding.
        """
        if not self.routers[chunk] or self.routers[chunk][0].mode not in ("replay", "observe"):
            return
        for router, target in zip(self.routers[chunk], self._targets(chunk, routes, take), strict=True):
            router.target_topk_idx, router.real = target, real
            if self._expected[1]:
                router.replay_backward_list.append(target)

    def _targets(
        self, chunk: int, routes: Routes | None, take: Callable[[Tensor], Tensor]
    ) -> Sequence[Tensor]:
        if routes is None:
            raise RoutingError("a micro-batch has no routes to replay")
        if isinstance(routes, RecordedRoutes):
            return routes.layers[chunk]
        first = sum(map(len, self.routers[:chunk]))
        return take(routes.load()).unbind(1)[first : first + len(self.routers[chunk])]

    def take_counts(self) -> dict[int, LayerCounts]:
        """Return the counts of the last pass by layer; empty where nothing was counted."""
        return {router.layer: router.counts for router in self._all() if router.counts is not None}

    def take_rows(self) -> Tensor | None:
        """Return bool [2, tokens of this rank in all micro-batches]: which had a given route, and whose live routing
        differs from it in any layer; None where nothing was compared."""
        compared = [router for router in self._all() if router.known_rows]
        if not compared:
            return None
        known = [torch.cat(router.known_rows) for router in compared]
        changed = [torch.cat(router.changed_rows) for router in compared]
        return torch.stack([torch.stack(known).any(0), torch.stack(changed).any(0)])
