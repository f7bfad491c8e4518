"""Asking another computer for a score: JSON over HTTP, with retries that know which failures may pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import httpx

from megarl.errors import UserError
from megarl.settings import user_path

RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
LONGEST_WAIT_S = 30.0


class ServiceFailure(Exception):
    """No score could be had; the message says why."""


class JsonClient:
    """POSTs JSON to one address.

    retries: further attempts after the first, for refused and broken connections, time-outs and the status
        codes in RETRIED; waits grow from `backoff_s` by doubling, with jitter, and follow `Retry-After`.
    timeout_s: of one attempt. concurrency: requests under way at once. token_file: a file holding a bearer token.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        retries: int,
        backoff_s: float,
        concurrency: int,
        headers: Mapping[str, str] | None = None,
        token_file: str | None = None,
    ) -> None:
        self.url = url
        self.retries = retries
        self.backoff_s = backoff_s
        token = {"Authorization": f"Bearer {_token(token_file)}"} if token_file is not None else {}
        self._client = httpx.AsyncClient(timeout=timeout_s, headers={**(headers or {}), **token})
        self._slots = asyncio.Semaphore(concurrency)

    async def post(self, body: Any) -> Any:
        """Return the decoded JSON of the answer. Raises ServiceFailure."""
        async with self._slots:
            for attempt in range(self.retries + 1):
                failure, wait_s = await self._attempt(body)
                if not isinstance(failure, str):
                    return failure["json"]
                if wait_s is None or attempt == self.retries:
                    raise ServiceFailure(f"{self.url}: {failure} (attempt {attempt + 1})")
                grown = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(max(grown, wait_s), LONGEST_WAIT_S))
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _attempt(self, body: Any) -> tuple[dict[str, Any] | str, float | None]:
        """Return ({"json": answer}, None), or what failed and the least seconds to wait (None: don't try again)."""
        try:
            answer = await self._client.post(self.url, json=body)
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}", 0.0
        if answer.status_code in RETRIED:
            return f"status {answer.status_code}", _retry_after(answer)
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text[:200]}", None
        try:
            return {"json": answer.json()}, None
        except ValueError as error:
            return f"the answer is not JSON: {error}", None


def _retry_after(answer: httpx.Response) -> float:
    try:
        return float(answer.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0  # a date


def _token(path: str) -> str:
    try:
        return user_path(path, "token_file").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"token_file {path!r} cannot be read: {error}") from error


def check_http(*, url: str, token_file: str | None = None, **_: object) -> None:
    """Refuse an address or a token that cannot work; for `@verifier(check=...)`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"url {url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"url {url!r} must begin with http:// or https:// and name a host")
    if token_file is not None:
        _token(token_file)
