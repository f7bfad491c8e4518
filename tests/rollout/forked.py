"""Real SGLang servers for many models: forked from one process that has imported SGLang (`forked_sglang.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from megarl.rollout.sglang import supervise
from megarl.rollout.sglang.launch import server_command
from megarl.rollout.sglang.layout import FusedLayout
from megarl.rollout.sglang.process import free_port
from megarl.rollout.sglang.settings import SGLangSettings
from tests.rollout.engines import find_sglang
from tests.rollout.scripted import context_of

PROGRAM = Path(__file__).with_name("forked_sglang.py")
PATIENCE = 120.0  # seconds until a server must answer


class ForkedServers:
    """Started with the arguments that megarl gives its own servers. They end with `close`, or with this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [str(find_sglang()), str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "forked_sglang.log").open("wb"),
            text=True,
            env=environment,
        )

    @contextlib.contextmanager
    def serving(self, model: Path) -> Iterator[str]:
        """The URL of a server that holds this model, meanwhile."""
        settings = SGLangSettings(python=str(find_sglang()), max_running_requests=8)
        command = server_command(settings, context_of(model, model), 0, FusedLayout.of(model).told)
        port, log = free_port("127.0.0.1"), self.folder / f"{model.name}.log"
        arguments = [str(log), *command[3:], "--host", "127.0.0.1", "--port", str(port)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before = supervise.names_of_all()
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        group = int(self._process.stdout.readline())
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
            while not _ready(url):
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.1)
            yield url
        finally:
            left = supervise.segments(group, before)
            os.killpg(group, signal.SIGKILL)
            supervise.remove_segments(left)

    def close(self) -> None:
        self._process.communicate()


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/ready", timeout=5.0, trust_env=False).status_code == 200
    return False
