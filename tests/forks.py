"""Processes that are forked from one that has imported torch, megatron-core and megarl: they start in milliseconds.

`start_megarl` is the command line in such a process: its own argument list, folder, environment, output, session and
exit code. `tests.ranks` runs jobs in them.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def fork(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A started process that calls this function of a module; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    process = context.Process(target=_enter, args=(function, *arguments), daemon=True)
    process.start()
    return process


def pipe() -> tuple[Connection, Connection]:
    """The ends to read and to write, the second of which can be given to a fork."""
    return multiprocessing.get_context("forkserver").Pipe(duplex=False)


def _enter(function: Callable[..., Any], *arguments: Any) -> None:
    from megarl.launcher import die_with_parent

    die_with_parent()
    threads = getattr(sys.modules.get("tests.warm"), "threads", 0)
    if threads != 1:
        raise RuntimeError(f"what tests.warm imports runs {threads} threads; 1 can be forked")
    function(*arguments)


class Fork:
    """A forked command, with the part of `subprocess.Popen` that tests use. Its output is read while it runs."""

    def __init__(self, process: BaseProcess, *outputs: Connection) -> None:
        self._process = process
        self._read: list[list[bytes]] = [[] for _ in outputs]
        self._readers = [
            threading.Thread(target=_read, args=(output, into), daemon=True)
            for output, into in zip(outputs, self._read, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written as output and as errors, at its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("megarl", timeout or 0)
        for reader in self._readers:
            reader.join(timeout)
        output, errors = (b"".join(parts).decode(errors="replace") for parts in (*self._read, [])[:2])
        return output, errors

    def end(self) -> None:
        """Kill it and what it started."""
        os.killpg(self.pid, signal.SIGKILL)


def _read(output: Connection, into: list[bytes]) -> None:
    while part := os.read(output.fileno(), 1 << 16):
        into.append(part)


def start(
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    environment: Mapping[str, str],
    together: bool = False,
) -> Fork:
    """This function, in what is like a new process: a folder, an environment and a session of its own.

    together: its errors go where its output goes.
    """
    outputs = [pipe()] if together else [pipe(), pipe()]
    written = [write for _, write in outputs]
    process = fork(_become_new, function, arguments, folder, dict(environment), *written)
    for write in written:
        write.close()
    return Fork(process, *(read for read, _ in outputs))


def _become_new(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
    environment: dict[str, str],
    *outputs: Connection,
) -> None:
    """What a new process inherits is given by hand."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, output in zip((1, 2), (outputs[0], outputs[-1]), strict=True):
        os.dup2(output.fileno(), stream)
    for output in outputs:
        output.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the end
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    function(*arguments)


def start_megarl(*words: str, folder: Path, environment: Mapping[str, str], together: bool = False) -> Fork:
    """`megarl WORDS`."""
    file_size = resource.getrlimit(resource.RLIMIT_FSIZE)
    return start(_megarl, words, file_size, folder=folder, environment=environment, together=together)


def _megarl(words: tuple[str, ...], file_size: tuple[int, int]) -> None:
    from megarl.cli import main

    resource.setrlimit(resource.RLIMIT_FSIZE, file_size)
    main(list(words))


@dataclass
class Finished:
    returncode: int
    stdout: str
    stderr: str


def run_megarl(*words: str, timeout: float = 300, **variables: str) -> Finished:
    """`megarl WORDS` in this folder, to its end. variables: added to this environment."""
    environment = environment_of_a_command() | variables
    return finish(start_megarl(*words, folder=Path.cwd(), environment=environment), timeout)


def finish(process: Fork, timeout: float = 300) -> Finished:
    """Wait for its end. Raises subprocess.TimeoutExpired, after killing it."""
    try:
        stdout, stderr = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.end()
        raise
    assert process.returncode is not None
    return Finished(process.returncode, stdout, stderr)


def environment_of_a_command() -> dict[str, str]:
    """This process's, without the rendezvous that what ran alone in it has left."""
    left = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in left}
