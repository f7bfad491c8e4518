"""`python supervise.py PARENT_PID COMMAND...`: run a command that must not outlive the process that asked for it.

Standard library only and run by path, so that it starts in milliseconds. It leads a process group of its own, in
which the command and all its children live. Twice a second it looks whether its parent still lives; if not (even
killed with -9), the whole group is killed. A death signal (`PR_SET_PDEATHSIG`) would not do for that, since it comes
when the *thread* that started the child ends; it does for the command, which ends with its supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

INTERVAL = 0.5  # seconds between two looks at the parent
PR_SET_PDEATHSIG = 1


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # Ctrl-C and SIGTERM are for the group's parent and for the command: the supervisor ends with its command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc, me = ctypes.CDLL(None), os.getpid()

    def before_the_command() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:  # it died meanwhile
            os._exit(128 + signal.SIGKILL)

    child = subprocess.Popen(command, preexec_fn=before_the_command)
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(INTERVAL)
    os.killpg(0, signal.SIGTERM)  # what the command left behind; the supervisor ignores it
    # 128 + n for a command that signal n ended, as a shell has it.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
