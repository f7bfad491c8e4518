"""One SGLang server as a process: started in an environment of its own, watched, stopped with all its children."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from megarl.errors import UserError
from megarl.monitor.signals import killed_by
from megarl.rollout.sglang import supervise

LOG_LINES_SHOWN = 25
STOP_SECONDS = 15.0  # SGLang drains in about 4 s after SIGTERM
SERVER_PORTS = (20_000, 32_768)  # below those that Linux gives to whoever asks for any
IN_USE = "address already in use"

# What a trainer's environment must not hand on: its launcher's rendezvous and its own Python.
_NOT_INHERITED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|PYTHON(PATH|HOME)|VIRTUAL_ENV"
)


class ServerDied(UserError):
    """The server ended while it started; the message holds its last log lines."""


@dataclass(eq=False)
class ServerProcess:
    """A server process group and its log file.

    command: the interpreter, `-m`, the module and its arguments, without host and port.
    host: what it listens on. address: where others find it. fixed_port: the user's, or None for any free one.
    environment: added to what this process inherits (minus the launcher's variables).
    start_timeout: seconds until it must answer.
    """

    command: Sequence[str]
    host: str
    address: str
    fixed_port: int | None
    log_file: Path
    environment: Mapping[str, str]
    start_timeout: float
    port: int = field(default=0, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _before: frozenset[str] = field(default=frozenset(), init=False)  # names in shared memory when it started
    _segments: set[str] = field(default_factory=set, init=False)  # its own there, as far as seen

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Return the process group's id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def ends_within(self, seconds: float) -> bool:
        """Tell whether it has ended, or does so in this time."""
        if (process := self._process) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        return self.pid is None

    def start(self, *arguments: str) -> None:
        """Start, with these further arguments, and wait until the server answers.

        A port taken by somebody else is a UserError if the user fixed it; otherwise another one is tried.
        Raises ServerDied with the last log lines if the server ends, UserError if it takes too long.
        """
        for attempt in range(3):
            self.port = self._choose_port(again=attempt > 0)
            self._launch(arguments)
            try:
                self._await_ready()
                return
            except ServerDied:
                self.stop()
                taken = not _is_free(self.host, self.port) or IN_USE in self.log_tail(200)
                if self.fixed_port or not taken or attempt == 2:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL for what is left; remove its shared memory. Idempotent."""
        if self._process is None:
            return
        self._look_for_segments()
        process, self._process = self._process, None
        if process.poll() is not None:
            if process.returncode < 0:  # a supervisor that was killed could end nobody
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        supervise.remove_segments(self._segments)
        self._segments.clear()

    def _look_for_segments(self) -> None:
        if self._process is not None and supervise.names_of_all() - self._before - self._segments:
            self._segments |= supervise.segments(self._process.pid, self._before)

    def describe(self) -> str:
        """Say in one line how a process that no longer runs has ended."""
        code = self._process.poll() if self._process else None
        if code is None:
            how = "was stopped"
        elif code < 0 or code > 128:
            how = killed_by(-code if code < 0 else code - 128)
        else:
            how = f"ended with exit code {code}"
        return f"SGLang server at {self.url} {how} (log: {self.log_file})"

    def log_tail(self, lines: int = LOG_LINES_SHOWN) -> str:
        """Return the last lines of the log."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(0, self.log_file.stat().st_size - 65536))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"(the log cannot be read: {error})"
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])

    def _choose_port(self, again: bool) -> int:
        if self.fixed_port is None:
            # After a restart where it was: others may know it by its URL.
            keep = self.port and not again and _is_free(self.host, self.port)
            return self.port if keep else free_port(self.host)
        if not _is_free(self.host, self.fixed_port):
            raise UserError(
                f"port {self.fixed_port} on {self.host} is in use: stop what listens there, or leave the "
                f"SGLang port unset to get a free one"
            )
        return self.fixed_port

    def _launch(self, arguments: Sequence[str]) -> None:
        command = [*self.command, *arguments, "--host", self.host, "--port", str(self.port)]
        environment = {
            name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)
        } | dict(self.environment)
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            log = self.log_file.open("ab")
        except OSError as error:
            raise UserError(f"the SGLang log {self.log_file} cannot be written: {error}") from None
        self._before = supervise.names_of_all()
        with log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervise.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self.pid is None:
                    raise ServerDied(
                        f"{self.describe()} while it started; its last lines:\n{self.log_tail()}"
                    )
                self._look_for_segments()
                try:
                    if client.get("/ready").status_code == 200:
                        self._look_for_segments()
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.25)
        raise UserError(
            f"SGLang server at {self.url} was not ready after {self.start_timeout:.0f} s (start_timeout); "
            f"the last lines of {self.log_file}:\n{self.log_tail()}"
        )


def free_port(host: str) -> int:
    """Return a port nobody listens on now, and that the system gives to nobody who asks for any: a server takes
    seconds to open it, and asks for others of its own meanwhile."""
    draw = random.SystemRandom()
    for _ in range(100):
        if _is_free(host, port := draw.randrange(*SERVER_PORTS)):
            return port
    raise UserError(f"no port of {SERVER_PORTS[0]} to {SERVER_PORTS[1]} on {host} is free")


def every_interface(address: str) -> str:
    """Return what a server listens on that others find at this address: IPv6's interfaces, if it has no other."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # only others know the name
        return "0.0.0.0"
    return "::" if all(family == socket.AF_INET6 for family, *_ in found) else "0.0.0.0"


def _is_free(host: str, port: int) -> bool:
    """Return whether nobody listens there. host: "" for all interfaces, of IPv4 and, where there is one, of IPv6."""
    try:
        ways = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    return all(_can_bind(family, address, needed=bool(host)) for family, _, _, _, address in ways)


def _can_bind(family: int, address: Any, *, needed: bool) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        return not needed and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
    return True
