"""Real SGLang servers that are forked from one process which has imported SGLang: one starts in two seconds.

Run by path with SGLang's own interpreter, and never imported by tests. A line of standard input is a JSON list, the
log file and `launch_server`'s arguments; the answer is the process group of the server. All end with standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys


def main() -> None:
    from sglang_cpu.__main__ import ARGUMENTS, ENVIRONMENT, STAND_INS

    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(STAND_INS))
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[method-assign]
    groups = []
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            serve(log, [*ARGUMENTS, *arguments])
        groups.append(pid)
        print(pid, flush=True)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def serve(log: str, arguments: list[str]) -> None:
    """Be a server, in a process group of its own."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the process that it was forked from
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args

        run_server(prepare_server_args(arguments))
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
