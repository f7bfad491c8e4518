"""Many requests at once against some servers: bounded, retried, abortable, answered in order of completion."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from megarl.errors import UserError
from megarl.rollout.engine import EngineError, GenerateRequest, GenerateResult
from megarl.rollout.sglang.client import Server, at_once, error_message
from megarl.rollout.sglang.wire import UnknownWeights, encode_request, nothing_sampled

KEEP_ALIVE = 2.0  # seconds a connection may be idle; the server closes it after 5
ABORT_INTERVAL = 0.2  # seconds between two attempts to abort a request
RELOAD_INTERVAL = 1.0  # seconds between two looks whether a restarted server has its weights
TIMEOUT = 3600.0  # seconds for one response
RETRIES = 3  # of a request whose connection broke
BACKOFF = 0.5  # seconds before the first retry, twice that before the second, ...


@dataclass(eq=False)
class Flight:
    """A request under way. `aborted` belongs to `loop`; rid and server change with every attempt."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    rid: str = ""
    server: Server | None = None

    @property
    def name(self) -> str:
        return f"request {self.request.request_id!r}"


@dataclass(eq=False)
class RequestRunner:
    """Sends requests to the least busy of `servers`.

    decode: makes a result of an answer. recover: called (in a thread) with a server that did not answer;
    returns when a retry makes sense, raises if not. concurrency: requests sent at once by one `run`.
    patience: seconds that a restarted server may take to get its weights.
    """

    servers: Sequence[Server]
    decode: Callable[[GenerateRequest, dict[str, Any]], GenerateResult]
    recover: Callable[[Server], None]
    concurrency: int
    patience: float
    _flights: dict[str, Flight] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    async def run(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[GenerateResult]:
        """Yield results in order of completion. Raises UserError for a repeated id or a request that SGLang refuses."""
        flights = self._register(requests)
        gate = asyncio.Semaphore(self.concurrency)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(TIMEOUT, connect=30.0, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE),
            trust_env=False,
        ) as client:
            tasks = [asyncio.create_task(self._fly(flight, client, gate)) for flight in flights]
            try:
                for result in asyncio.as_completed(tasks):
                    yield await result
            finally:
                left = [flight for flight, task in zip(flights, tasks, strict=True) if not task.done()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._forget(flights)
                await asyncio.to_thread(at_once, _abort_now, left)

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all), from any thread. The servers know it when this returns."""
        with self._lock:
            ids = list(self._flights) if request_ids is None else request_ids
            flights = [self._flights[i] for i in ids if i in self._flights]
        for flight in flights:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
                flight.loop.call_soon_threadsafe(flight.aborted.set)
        at_once(_abort_now, flights)

    def _register(self, requests: Sequence[GenerateRequest]) -> list[Flight]:
        loop = asyncio.get_running_loop()
        flights = [Flight(request, loop) for request in requests]
        with self._lock:
            under_way = set(self._flights)
            for flight in flights:
                if flight.request.request_id in under_way:
                    raise UserError(f"{flight.name}: another request with this id is under way")
                under_way.add(flight.request.request_id)
            self._flights.update((flight.request.request_id, flight) for flight in flights)
        return flights

    def _forget(self, flights: Sequence[Flight]) -> None:
        with self._lock:
            for flight in flights:
                if self._flights.get(flight.request.request_id) is flight:
                    del self._flights[flight.request.request_id]

    async def _fly(
        self, flight: Flight, client: httpx.AsyncClient, gate: asyncio.Semaphore
    ) -> GenerateResult:
        give_up = flight.loop.time() + self.patience
        failures = 0
        async with gate:
            while not flight.aborted.is_set():
                try:
                    result = await self._attempt(flight, client)
                except UnknownWeights:
                    if flight.loop.time() > give_up:
                        raise
                    await asyncio.sleep(RELOAD_INTERVAL)
                except (httpx.HTTPStatusError, httpx.TransportError) as error:
                    assert flight.server is not None
                    failures += 1
                    if failures > RETRIES:
                        raise EngineError(
                            f"{flight.name}: SGLang server at {flight.server.url} failed {failures} times: {error!r}"
                        ) from error
                    await asyncio.to_thread(self.recover, flight.server)
                    await asyncio.sleep(BACKOFF * 2 ** (failures - 1))
                else:
                    self._forget([flight])
                    return result
        return nothing_sampled(flight.request)

    async def _attempt(self, flight: Flight, client: httpx.AsyncClient) -> GenerateResult:
        flight.server = min(self.servers, key=lambda server: server.in_flight)
        flight.rid = uuid.uuid4().hex
        with flight.server.busy():
            response = await self._post(flight, flight.server, client)
        if 400 <= response.status_code < 500:
            raise UserError(f"{flight.name}: SGLang refuses it: {error_message(response)}")
        response.raise_for_status()
        return self.decode(flight.request, response.json())

    async def _post(self, flight: Flight, server: Server, client: httpx.AsyncClient) -> httpx.Response:
        body = encode_request(flight.request, flight.rid)
        answer = asyncio.ensure_future(client.post(server.url + "/generate", json=body))
        aborted = asyncio.ensure_future(flight.aborted.wait())
        try:
            await asyncio.wait({answer, aborted}, return_when=asyncio.FIRST_COMPLETED)
            while not answer.done():
                # Again and again: SGLang forgets an abort that overtakes its request.
                with contextlib.suppress(httpx.HTTPError):
                    await client.post(server.url + "/abort_request", json={"rid": flight.rid})
                await asyncio.wait({answer}, timeout=ABORT_INTERVAL)
            return answer.result()
        finally:
            aborted.cancel()
            answer.cancel()


def _abort_now(flight: Flight) -> None:
    if flight.server is not None:
        with contextlib.suppress(httpx.HTTPError, EngineError):
            flight.server.post("/abort_request", {"rid": flight.rid})
