"""`python supervise.py PARENT_PID COMMAND...`: run a command that must not outlive the process that asked for it.

Standard library only and run by path, so that it starts in milliseconds. It leads a process group of its own, in
which the command and all its children live. Twice a second it looks whether its parent still lives; if not (even
killed with -9), the whole group is killed. The parent's own death signal (`PR_SET_PDEATHSIG`) would not do: it fires
when the *thread* that started the child ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

INTERVAL = 0.5  # seconds between two looks at the parent


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # Ctrl-C and SIGTERM are for the group's parent and for the command: the supervisor ends with its command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=_default_signals)
    while child.poll() is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(INTERVAL)
    os.killpg(0, signal.SIGTERM)  # what the command left behind; the supervisor ignores it
    # 128 + n for a command that signal n ended, as a shell has it.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
