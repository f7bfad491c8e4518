"""A small real HTTP server whose behaviour a test decides."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

# (path, headers, body) -> (status, headers, JSON value or raw bytes)
Behaviour = Callable[[str, dict[str, str], Any], tuple[int, dict[str, str], Any]]


@dataclass
class Server:
    """url: where it listens. bodies: every request's JSON, in order. most_at_once: requests under way together."""

    url: str
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    now: int = 0
    most_at_once: int = 0


@contextmanager
def serving(behaviour: Behaviour, host: str = "127.0.0.1") -> Iterator[Server]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = dict(self.headers)
            with lock:
                server.bodies.append(body)
                server.headers.append(headers)
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            try:
                status, extra, answer = behaviour(self.path, headers, body)
            finally:
                with lock:
                    server.now -= 1
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **extra}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    http = Listener((host, 0), Handler)
    server = Server(f"http://{f'[{host}]' if ':' in host else host}:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def dead_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable names a proxy at which nobody answers, and NO_PROXY excepts nobody."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, "socks5://127.0.0.1:9" if "all" in name else "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)


HOSTS = ("127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")))


def failing_first(times: int, status: int, then: Behaviour, **headers: str) -> Behaviour:
    """Answers `status` the first so many times."""
    left = iter(range(times))  # `next` of an iterator is one step for every thread

    def behave(path: str, given: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        return then(path, given, body) if next(left, None) is None else (status, headers, b"busy")

    return behave


def slow(seconds: float, then: Behaviour) -> Behaviour:
    def behave(path: str, given: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        time.sleep(seconds)
        return then(path, given, body)

    return behave
