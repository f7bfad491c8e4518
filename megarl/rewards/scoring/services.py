"""The host of verifiers that ask another computer: an event loop in a thread of its own, one instance a part.

It is not anyio's blocking portal, because that one makes the caller's event loop wait for this one's at each job.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from megarl.rewards.contract import GroundTruth, Response, Score, to_score, unscored


class ServiceHost:
    """Runs `service` verifiers in its own thread, so that neither their connections nor their retries depend
    on the caller's event loop. The thread starts with the first job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._instances: dict[str, Any] = {}

    def submit(
        self, name: str, make: Callable[[], Any], response: Response, ground_truth: GroundTruth
    ) -> Future[Score]:
        """Score one response by the instance called `name`, which is made at its first use."""
        job = self._score(name, make, response, ground_truth)
        return asyncio.run_coroutine_threadsafe(job, self._running_loop())

    def close(self) -> None:
        """Close every instance, stop the loop, join the thread. Idempotent."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close_instances(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                run = self._loop.run_forever
                self._thread = threading.Thread(target=run, name="scoring-services", daemon=True)
                self._thread.start()
            return self._loop

    async def _score(
        self, name: str, make: Callable[[], Any], response: Response, ground_truth: GroundTruth
    ) -> Score:
        try:
            if name not in self._instances:
                self._instances[name] = make()
            return to_score(await self._instances[name](response, ground_truth))
        except Exception as error:
            return unscored(error)

    async def _close_instances(self) -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        for instance in self._instances.values():
            await instance.aclose()
        self._instances.clear()
