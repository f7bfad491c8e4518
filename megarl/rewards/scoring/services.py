"""The host of verifiers that ask another computer: an event loop in a thread of its own, one instance a part.

The loop is anyio's blocking portal, so neither connections nor retries depend on the caller's event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from megarl.rewards.contract import GroundTruth, Response, Score, to_score, unscored
from megarl.rewards.verifiers import Verifier


class ServiceHost:
    """Runs `service` verifiers. The thread starts with the first job; `close` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._thread = ExitStack()
        self._instances: dict[str, Any] = {}

    def submit(
        self,
        name: str,
        verifier: Verifier,
        options: Mapping[str, Any],
        response: Response,
        ground_truth: GroundTruth,
    ) -> Future[Score]:
        """Score one response by the instance called `name`, which is made at its first use with `options`."""
        with self._lock:
            if self._portal is None:
                self._portal = self._thread.enter_context(start_blocking_portal(name="scoring-services"))
            portal = self._portal
        return portal.start_task_soon(self._score, name, verifier, options, response, ground_truth)

    def close(self) -> None:
        """Close every instance, cancel what is under way, join the thread. Idempotent."""
        with self._lock:
            portal, self._portal = self._portal, None
        if portal is not None:
            portal.call(self._close_instances)
            portal.call(portal.stop, True)
            self._thread.close()

    async def _score(
        self,
        name: str,
        verifier: Verifier,
        options: Mapping[str, Any],
        response: Response,
        ground_truth: GroundTruth,
    ) -> Score:
        try:
            if name not in self._instances:
                self._instances[name] = verifier.function(**options)
            return to_score(await self._instances[name](response, ground_truth))
        except Exception as error:
            return unscored(error)

    async def _close_instances(self) -> None:
        for instance in self._instances.values():
            await instance.aclose()
        self._instances.clear()
