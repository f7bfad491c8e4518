"""`remote`: a reward service over HTTP.

Request, one POST for up to `batch_size` responses:
    {"items": [{"response": text, "prompt": text, "ground_truth": {...}, "tokens": 812,
    "finish_reason": "stop"}, ...]}
Answer, in the same order; null means "could not be scored":
    {"scores": [0.5, null, {"score": 1.0, "parts": {"style": 0.9}, "reason": "..."}, ...]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megarl.rewards.contract import GroundTruth, Response, Score, to_score, verifier
from megarl.rewards.http import JsonClient, Seconds, ServiceFailure, Wait, check_http

_Waiting = tuple[dict[str, Any], "asyncio.Future[Score]"]


@verifier(run_in="service", timeout_s=300.0, check=check_http)
class Remote:
    """Sends responses in batches: a batch leaves when it is full, or `max_wait_s` after its first response.

    timeout_s: of one request; retries, backoff_s: see `JsonClient`. concurrency: batches under way at once.
    headers, token_file: sent with each request; a token belongs in a file, not in a configuration.
    proxy: none, unless an address or `environment` is given; see `JsonClient`.
    """

    def __init__(
        self,
        *,
        url: str,
        batch_size: Annotated[int, Field(ge=1)] = 32,
        max_wait_s: Wait = 0.05,
        timeout_s: Seconds = 60.0,
        retries: Annotated[int, Field(ge=0)] = 4,
        backoff_s: Wait = 0.5,
        concurrency: Annotated[int, Field(ge=1)] = 8,
        headers: Mapping[str, str] | None = None,
        token_file: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self._client = JsonClient(
            url,
            timeout_s=timeout_s,
            retries=retries,
            backoff_s=backoff_s,
            concurrency=concurrency,
            headers=headers,
            token_file=token_file,
            proxy=proxy,
        )
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def __call__(self, response: Response, ground_truth: GroundTruth) -> Score:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Score] = loop.create_future()
        item = {
            "response": response.text,
            "prompt": response.prompt,
            "ground_truth": dict(ground_truth),
            "tokens": response.tokens,
            "finish_reason": response.finish_reason,
        }
        self._waiting.append((item, future))
        if len(self._waiting) >= self._batch_size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._send)
        return await future

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()
        await self._client.aclose()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.get_running_loop().create_task(self._score(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _score(self, batch: list[_Waiting]) -> None:
        try:
            answer = await self._client.post({"items": [item for item, _ in batch]})
            scores = _scores(answer, len(batch))
        except Exception as error:
            reason = str(error) if isinstance(error, ServiceFailure) else f"{type(error).__name__}: {error}"
            scores = [Score(None, reason=reason)] * len(batch)
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)


def _scores(answer: Any, expected: int) -> list[Score]:
    given = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(given, list) or len(given) != expected:
        got = f"{len(given)} scores" if isinstance(given, list) else "no list 'scores'"
        raise ServiceFailure(f"the service answered with {got} for {expected} responses")
    return [_score(one) for one in given]


def _score(given: Any) -> Score:
    if given is None:
        return Score(None, reason="the service could not score it")
    if not isinstance(given, dict):
        return to_score(given)
    value, reason, parts = given.get("score"), given.get("reason"), given.get("parts") or {}
    if not isinstance(parts, dict):
        return Score(None, reason=f"the service's parts are a {type(parts).__name__}, not an object")
    clean = {key: to_score(part).value if part is not None else None for key, part in parts.items()}
    if value is None:
        return Score(None, clean, str(reason or "the service could not score it"))
    scored = to_score(value)
    return Score(scored.value, clean, scored.reason or (None if reason is None else str(reason)))
