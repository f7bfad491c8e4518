"""`python -m tests.measured COMMAND ...`: run it, wait for every process that it leaves, and say what all have cost."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    start = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to this process, which counts them, too
    command, code = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ), 0
    while True:
        try:
            ended, status = os.wait()  # at once, since tests see whether a process has gone
        except ChildProcessError:
            break
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - start
    print(f"[test] {wall / 60:.1f} minutes of wall time, {cpu / 60:.1f} CPU-minutes ({cpu:.0f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())
