"""A small real HTTP server whose behaviour a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (path, headers, body) -> (status, headers, JSON value or raw bytes)
Behaviour = Callable[[str, dict[str, str], Any], tuple[int, dict[str, str], Any]]


class Server:
    """url: where it listens. bodies: every request's JSON, in order. most_at_once: requests under way together."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = dict(self.headers)
                with outer._lock:
                    outer.bodies.append(body)
                    outer.headers.append(headers)
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                try:
                    status, extra, answer = behaviour(self.path, headers, body)
                finally:
                    with outer._lock:
                        outer._now -= 1
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **extra}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[Server]:
    server = Server(behaviour)
    try:
        yield server
    finally:
        server.close()


def failing_first(times: int, status: int, then: Behaviour, **headers: str) -> Behaviour:
    """Answers `status` the first so many times."""
    left = [times]
    lock = threading.Lock()

    def behave(path: str, given: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        with lock:
            left[0] -= 1
            if left[0] >= 0:
                return status, headers, b"busy"
        return then(path, given, body)

    return behave


def slow(seconds: float, then: Behaviour) -> Behaviour:
    def behave(path: str, given: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        time.sleep(seconds)
        return then(path, given, body)

    return behave
