"""`python -m tests.measured COMMAND ...`: run it, wait for every process that it leaves, and say what all have cost."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    start = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to this process, which counts them, too
    code = subprocess.Popen(sys.argv[1:]).wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - start
    print(f"[test] {wall / 60:.1f} minutes of wall time, {cpu / 60:.1f} CPU-minutes ({cpu:.0f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())
