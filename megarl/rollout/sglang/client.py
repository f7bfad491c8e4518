"""One SGLang server as the engine sees it (control calls, what it says about itself, its life), and calls to many."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from megarl.errors import UserError
from megarl.rollout.engine import EngineError
from megarl.rollout.sglang.layout import FusedLayout
from megarl.rollout.sglang.process import ServerProcess

CONTROL_TIMEOUT = 600.0  # a weight bucket may take long; a dead server is noticed by its closed connection
HEALTH_TIMEOUT = 10.0
DYING_SECONDS = 30.0  # how long a process that does not answer may take to answer or to end
AT_ONCE = 16  # calls to servers

Item = TypeVar("Item")
Result = TypeVar("Result")


class Server:
    """A server with its process (None for one given by URL).

    in_flight: requests under way, for choosing the least busy server.
    """

    def __init__(self, url: str, process: ServerProcess | None) -> None:
        self._url = url
        self.process = process
        self.in_flight = 0
        self.restarts = 0
        self.lock = threading.Lock()
        # Connections are not kept: the server closes idle ones, and a call on a closed one looks like its death.
        self._client = httpx.Client(
            timeout=httpx.Timeout(CONTROL_TIMEOUT, connect=10.0),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        self._counting = threading.Lock()

    @property
    def url(self) -> str:
        return self.process.url if self.process else self._url

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count one more request under way."""
        with self._counting:
            self.in_flight += 1
        try:
            yield
        finally:
            with self._counting:
                self.in_flight -= 1

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a control request and return the answer's JSON, empty if it has none.

        Raises EngineError with the server's message if it is refused, httpx.TransportError if nobody answers.
        """
        response = self._client.post(self.url + path, json=body)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        answer = response.json() if is_json else {}
        if response.status_code != 200:
            message = error_message(response)
            raise EngineError(f"SGLang server at {self.url}: {path} was refused: {message}")
        return answer if isinstance(answer, dict) else {}

    def info(self) -> dict[str, Any]:
        """Return `/server_info`, which also asks every scheduler process and so fails if one of them hangs."""
        response = self._client.get(self.url + "/server_info", timeout=HEALTH_TIMEOUT)
        response.raise_for_status()
        return response.json()

    def digests(self, layout: FusedLayout) -> dict[str, str]:
        """Return the hash of every parameter, computed now from the memory that samples."""
        answer = self.post("/weights_checker", {"action": "checksum"})
        return {
            layout.key(name, rank["parallelism_info"][0]["tp_rank"]): digest
            for rank in answer["ranks"]
            for name, digest in rank["checksums"].items()
        }

    def health(self) -> str | None:
        """Return None when well, else one line."""
        if self.process and self.process.pid is None:
            return self.process.describe()
        try:
            self.info()
        except httpx.HTTPError as error:
            if self.process and self.process.ends_within(1.0):  # the connection is gone before the process is
                return self.process.describe()
            return f"SGLang server at {self.url} does not answer: {error!r}"
        return None

    def await_answer_or_death(self, patience: float) -> bool:
        """Return True as soon as it answers, False when its process has ended or does not answer for long.

        patience: seconds for a given server, of which nothing else is known.
        """
        deadline = time.monotonic() + (DYING_SECONDS if self.process else patience)
        while True:
            try:
                if self._client.get(self.url + "/ready", timeout=5.0).status_code == 200:
                    return True
            except httpx.TransportError:
                pass
            if time.monotonic() >= deadline or (self.process and self.process.pid is None):
                return False
            time.sleep(0.1)

    def start(self, *arguments: str) -> None:
        """Start a managed server, with these further arguments; look for a given one.

        Raises UserError if it does not come up or is not there.
        """
        if self.process:
            self.process.start(*arguments)
        elif not self.await_answer_or_death(patience=0.0):
            raise UserError(
                f"no SGLang server answers at {self.url}: start it, or correct the url in the configuration"
            )

    def close(self) -> None:
        with self.lock:  # it may be being started again
            if self.process:
                self.process.stop()
            self._client.close()


def error_message(response: httpx.Response) -> str:
    """Return what the server says about a refused request, in whichever of its shapes."""
    try:
        answer = response.json()
    except ValueError:
        return response.text.strip()[:1000] or f"HTTP {response.status_code}"
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)[:1000]
    return str(answer)[:1000]


def at_once(action: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do `action` to every item, in threads of this call; wait for all, then raise the first failure.

    Threads are not shared between calls, so that one call may be made from within another.
    """
    if len(items) <= 1:
        return [action(item) for item in items]
    with ThreadPoolExecutor(min(len(items), AT_ONCE)) as threads:
        done = [threads.submit(action, item) for item in items]
    return [future.result() for future in done]
