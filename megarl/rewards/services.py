"""Verifiers that ask another computer: one background event loop, one instance per part, closed with the
scorer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from megarl.rewards.registry import Reference, Response, Score, Verifier, to_score, unscored


class ServiceHost:
    """Runs `service` verifiers in its own thread, so that neither their connections nor their retries depend
    on the caller's event loop. The thread starts with the first job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._instances: dict[str, Any] = {}

    def submit(
        self,
        name: str,
        verifier: Verifier,
        options: Mapping[str, Any],
        response: Response,
        reference: Reference,
    ) -> Future[Score]:
        """Score one response by the instance called `name`, made at its first use with `options`."""
        return asyncio.run_coroutine_threadsafe(
            self._score(name, verifier, options, response, reference), self._running_loop()
        )

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
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="scoring-services", daemon=True
                )
                self._thread.start()
            return self._loop

    async def _score(
        self,
        name: str,
        verifier: Verifier,
        options: Mapping[str, Any],
        response: Response,
        reference: Reference,
    ) -> Score:
        try:
            if name not in self._instances:
                self._instances[name] = verifier.function(**options)
            return to_score(await self._instances[name](response, reference))
        except Exception as error:
            return unscored(error)

    async def _close_instances(self) -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        for instance in self._instances.values():
            await instance.aclose()
        self._instances.clear()
