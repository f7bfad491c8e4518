"""The processes that score: a template that has imported the verifiers, and workers forked from it.

`python -m megarl.rewards.scoring.worker FD` is the template. It is started as a plain program, not through
`multiprocessing`: so it neither inherits a training process's threads and collectives nor imports its main
module (and torch with it). It runs one thread and never a verifier, so forking it is safe, and a killed
worker is replaced in milliseconds, its imports shared.

The messages are described in `protocol.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from megarl.errors import UserError
from megarl.rewards.contract import Score, call
from megarl.rewards.scoring.protocol import FORK, PACKET, READY, REAP, STARTED
from megarl.rewards.verifiers import find

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REASON_CHARACTERS = 500


def main() -> None:
    """Be the template until the parent closes the control socket, or is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _die_with_parent()
    workers = _Workers()
    setup = json.loads(control.recv(PACKET))
    for path in setup["preload"]:
        with contextlib.suppress(Exception):  # whoever asks for it will be told
            found = find(path)
            if found.spec.warm is not None:
                found.spec.warm()
    gc.freeze()  # the workers share these pages; a collection would copy them
    control.send(READY)
    while True:
        message, sockets, _, _ = socket.recv_fds(control, PACKET, 1)
        if not message:
            return
        if message == FORK:
            control.send(str(workers.fork(control, sockets[0], setup["memory_bytes"])).encode())
        else:
            control.send(str(workers.reap(int(message.removeprefix(REAP)))).encode())


class _Workers:
    """The template's children: workers, and what is left of a killed one (a sandbox, say), which is buried here
    instead of waiting as a zombie for the machine's first process.
    """

    def __init__(self) -> None:
        self._ended: dict[int, int | None] = {}  # worker -> wait status, None while it lives
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            signal.signal(signal.SIGCHLD, lambda *_: self._bury())

    def fork(self, control: socket.socket, theirs: int, memory_bytes: int | None) -> int:
        """Return a new worker, served at the socket `theirs`; its pid."""
        # Blocked, so that a worker that dies at once is a known one when its end is heard of.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid:
            self._ended[pid] = None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if pid == 0:
            control.close()
            _serve(Connection(theirs), memory_bytes)
        with contextlib.suppress(
            OSError
        ):  # as the worker does itself: so its group can be killed from now on
            os.setpgid(pid, pid)
        os.close(theirs)
        return pid

    def reap(self, pid: int) -> int:
        """Return the wait status of a worker that is dead or dying."""
        if self._ended[pid] is None:
            with contextlib.suppress(ChildProcessError):  # the handler was quicker
                self._ended[pid] = os.waitpid(pid, 0)[1]
        return self._ended.pop(pid) or 0

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self._ended:
                    self._ended[found[0]] = found[1]


def _serve(connection: Connection, memory_bytes: int | None) -> None:
    """Be a worker; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # so that one kill ends what a verifier started, too
        _die_with_parent()
        if memory_bytes is not None:  # the soft limit, so that a verifier's own subprocess may set another
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
        random.seed()
        connection.send_bytes(READY)
        while True:
            connection.send_bytes(_answer(pickle.loads(connection.recv_bytes()), connection))
    except BaseException:
        os._exit(0)  # the pool is closed, or the parent gone


_found = functools.cache(find)


def _answer(job: dict[str, Any], connection: Connection) -> bytes:
    try:
        function = _found(job["path"]).function
    except UserError as error:
        connection.send_bytes(STARTED)
        score = Score(None, reason=str(error))
    else:
        connection.send_bytes(STARTED)
        score = call(function, job["response"], job["ground_truth"], job["options"])
    reason = score.reason[:REASON_CHARACTERS] if score.reason else None
    return json.dumps([score.value, dict(score.parts), reason], default=float).encode()


def _die_with_parent() -> None:
    """Linux: be killed when the thread or process that started us ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
