"""Signals: in words, and as what tells a run to end.

A run that is told to end in the midst of training finishes its step, saves a checkpoint and ends with 128 + n, as a
shell has it. Before training there is nothing to save, and it ends at once; so it does at a second signal.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, MappingProxyType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
END_NOW = signal.SIGUSR2  # for ranks that wait for one that is gone; it works in native code, too
SAME_SIGNAL = 1.0  # seconds in which a signal that comes again is the same: to a process and to its group
SHOW_CURSOR = b"\x1b[?25h"
OFTEN_MEANS = MappingProxyType(
    {
        signal.SIGKILL: "the kernel's OOM killer sends it when memory runs out (`dmesg` tells), and so does whoever "
        "limits a job's memory",
        signal.SIGBUS: "often shared memory or a disk is full (see `df /dev/shm`), or a mapped file was cut short",
        signal.SIGSEGV: "a fault in a library's native code",
        signal.SIGABRT: "a library gave up; its own message is above",
        signal.SIGILL: "a library was built for another processor",
    }
)


def name_of(number: int) -> str:
    """Return `SIGTERM`, or `signal 77` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def killed_by(number: int) -> str:
    """Return `was killed by signal 9 (SIGKILL): ` and what that often means, where it is known."""
    known = f" ({name})" if (name := name_of(number)).startswith("SIG") else ""
    means = OFTEN_MEANS.get(signal.Signals(number)) if known else None
    return f"was killed by signal {number}{known}{f': {means}' if means else ''}"


class Stopped(Exception):
    """A signal has ended the run in good order. number: of the signal. silent: another rank tells the user."""

    def __init__(self, number: int, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.number, self.silent = number, silent

    @property
    def exit_code(self) -> int:
        return 128 + self.number


class StopSignals:
    """What this process does when a signal tells it to end. Until `listen`: what it did before.

    number: of the signal that came while work could be saved, else 0. supervised: a process above (torchrun, or the
    one that forked the ranks) passes signals on, and kills this one at its own second signal.
    """

    def __init__(self) -> None:
        self.number, self.supervised = 0, False
        self._process, self._since = 0, 0.0
        self._can_save = self._is_closing = False

    def listen(self) -> None:
        """Take the signals. One that is ignored (SIGHUP, under nohup) stays ignored; SIGINT does not, since shells have
        jobs of the background ignore it. A fork that is to take them calls it, too."""
        self._process = os.getpid()
        for number in STOPS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def can_save(self) -> None:
        """From now on there is work that is not lost: the first signal is only noted, for the end of the step."""
        self._can_save = True

    def is_closing(self) -> None:
        """From now on the run ends anyway: the first signal changes nothing, nor does the end of another rank."""
        self._is_closing = True
        if self.supervised:
            signal.signal(END_NOW, signal.SIG_IGN)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # somebody's fork, which ends as any process does
            _end_by(number)
        told = os.environ.get("RANK", "0") == "0"
        if not self._can_save:
            if told:
                _say(f"stopped by {name_of(number)} before the first step: there is nothing to save")
            os._exit(128 + number)  # an exception would have to get past threads that start servers
        if not self.number:
            self.number, self._since = number, time.monotonic()
            if told and not self._is_closing:
                _say(
                    f"{name_of(number)}: the run finishes this step, saves a checkpoint and ends; a second signal ends "
                    "it at once"
                )
        elif not self.supervised and time.monotonic() - self._since > SAME_SIGNAL:
            _say("ended at once")
            _end_by(number)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say(line: str) -> None:
    """Write a line from a signal handler, where the console may be in the midst of one."""
    os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + f"megarl: {line}\n".encode())
