"""`python -m tests.measured COMMAND ...`: run it, wait for every process that it leaves, and say what all have cost."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
SECONDS_TO_FOLLOW = 60  # for processes that outlive the command


def main() -> int:
    start = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to this process, which counts them, too
    command, code, end = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ), 0, float("inf")
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)  # at once, since tests see whether a process has gone
        except ChildProcessError:
            break
        if ended == command:
            code, end = os.waitstatus_to_exitcode(status), time.monotonic()
        elif not ended and time.monotonic() > end + SECONDS_TO_FOLLOW:
            _kill_what_is_left()
        elif not ended:
            time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - start
    print(f"[test] {wall / 60:.1f} minutes of wall time, {cpu / 60:.1f} CPU-minutes ({cpu:.0f} s)")
    return code


def _kill_what_is_left() -> None:
    for process in psutil.Process().children(recursive=True):
        if process.status() != psutil.STATUS_ZOMBIE:
            print(f"[test] still running, killed: {process.pid} {' '.join(process.cmdline())[:120]}")
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
