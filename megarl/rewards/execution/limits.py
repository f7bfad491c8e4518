"""What a sandboxed program may use, and how one run of it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

MEBIBYTE = 1 << 20

Ended = Literal["exit", "signal", "cpu_time", "wall_time", "memory", "processes", "disk", "output", "lost"]


@dataclass(frozen=True)
class Limits:
    """The bounds of one run.

    cpu_seconds: processor time of the program and all it started, summed.
    wall_seconds: time on the clock; the net under sleepers, so it should be well above `cpu_seconds`. As that of a
        scoring worker it does not count what a crowded machine makes the program wait for a processor.
    memory_bytes: private memory of one process, and resident memory of all of them together.
    processes: processes and threads.
    file_bytes: size of one file. work_bytes: all files in the work folder together.
    output_bytes: standard output, and apart from it the JSON of a function's result.
    stack_bytes: the main thread's stack.
    """

    cpu_seconds: float = 6.0
    wall_seconds: float = 18.0
    memory_bytes: int = 1024 * MEBIBYTE
    processes: int = 32
    file_bytes: int = 64 * MEBIBYTE
    work_bytes: int = 256 * MEBIBYTE
    output_bytes: int = 8 * MEBIBYTE
    stack_bytes: int = 64 * MEBIBYTE
    open_files: int = 256

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (a misspelt limit in a configuration is an error)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 or math.isinf(value):
                raise ValueError(f"sandbox limit {name} must be a positive, finite number, not {value!r}")

    def rlimits(self, *, count_processes: bool) -> dict[str, Any]:
        """Return the limits by RLIMIT name, each [soft, hard] or one number for both.

        DATA rather than AS: language runtimes reserve far more address space than they use. CPU has a hard
        limit one second later, because a program may ignore the signal of the soft one.
        """
        cpu = math.ceil(self.cpu_seconds)
        limits: dict[str, Any] = {
            "CORE": 0,
            "CPU": [cpu, cpu + 1],
            "DATA": self.memory_bytes,
            "FSIZE": self.file_bytes,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "NOFILE": self.open_files,
            "STACK": self.stack_bytes,
        }
        if count_processes:
            limits["NPROC"] = self.processes
        return limits


@dataclass(frozen=True)
class SandboxResult:
    """The end of one run, and what it gave. All of it was steered by the program, and none of it is a verdict.

    ended: "exit" with `code`, "signal" with the signal's number in `code`, a limit's name, or "lost" (the
        program brought its whole sandbox down).
    result: JSON text of a called function's value, None if it never got so far.
    stderr: the end of it.
    """

    ended: Ended
    code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes | None = None
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    memory_bytes: int = 0

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.code == 0


class SandboxFailure(Exception):
    """The sandbox, not the program, failed: nothing can be said about the program."""
