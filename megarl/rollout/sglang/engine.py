"""The `sglang` engine: real SGLang servers behind the engine contract, started by megarl or given by URL.

Managed servers run in an environment of their own (`launch/install_sglang.sh` builds it), each in its own
process group with its log in the run folder. One that dies is started again, gets the last weights again, and
its requests are retried; none outlives megarl, even if megarl is killed with -9.

What a reader may not expect of SGLang:
- It also ends a response at the EOS tokens that the checkpoint names, whatever `stop_token_ids` say (which hold them,
  see `load_tokenizer`); only if there are none of these does nothing but the length end it.
- The default pause, `retract`, drops the keys and values of what runs. When it goes on it is prefilled again with
  the new weights: later tokens are exactly theirs, and so are all route rows, which the trace says in its spans.
- A request aborted while it waits in the queue (so any, while paused) may lose some or all of its tokens. Abort
  first, then pause, to keep them.
- Requests' seeds are ignored; the servers have their own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import torch

from megarl.errors import UserError
from megarl.rollout.declaration import EngineContext
from megarl.rollout.engine import EngineError, GenerateRequest, GenerateResult, WeightStream, check_request
from megarl.rollout.sglang.client import Server, at_once
from megarl.rollout.sglang.launch import dtype_of, server_command, server_environment
from megarl.rollout.sglang.layout import FusedLayout, expected_names
from megarl.rollout.sglang.process import ServerProcess, every_interface
from megarl.rollout.sglang.requests import RequestRunner
from megarl.rollout.sglang.settings import SGLangSettings
from megarl.rollout.sglang.sync import WeightSync
from megarl.rollout.sglang.transports import BroadcastTransport, HttpTransport, Transport
from megarl.rollout.sglang.wire import decode_result

MAX_RESTARTS = 3  # of one server, before giving up


class SGLangEngine:
    """The engine contract (`megarl.rollout.engine.Engine`) met by SGLang servers."""

    def __init__(self, settings: SGLangSettings, context: EngineContext) -> None:
        self._settings = settings
        self._context = context
        self._address = (settings.address or context.address or "127.0.0.1").strip("[]")
        self._layout = FusedLayout.of(
            context.model_path, tp_size=settings.tensor_parallel, device=context.device
        )
        self._running: _Running | None = None
        self._paused = False

    # --- life ---

    def start(self) -> None:
        """Start the servers (all at once), or find the given ones, and check that they fit. Idempotent.

        Raises UserError for a missing environment, a server that dies or doesn't come up (with its last log lines),
        a port in use, an unreachable URL, a server that was started with other settings.
        """
        if self._running:
            return
        settings = self._settings
        servers = [Server(url.rstrip("/"), None) for url in settings.urls] or [
            Server("", self._process(number)) for number in range(settings.servers)
        ]
        self._paused = False
        self._running = _Running(servers, self)
        try:
            at_once(self._start_server, servers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        with contextlib.suppress(EngineError, httpx.HTTPError):
            running.sync.close()
            if self._paused and self._settings.urls:
                at_once(lambda server: server.post("/continue_generation", self._continue()), running.servers)
        at_once(Server.close, running.servers)

    def health(self) -> str | None:
        if self._running is None:
            return "the sglang engine is not started"
        troubles = [*at_once(Server.health, self._running.servers), self._running.sync.trouble]
        return "; ".join(filter(None, troubles)) or None

    @property
    def weight_version(self) -> int:
        return self._running.sync.version if self._running else 0

    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._started().servers)

    # --- generation ---

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[GenerateResult]:
        running = self._started()
        if running.sync.trouble:
            raise EngineError(running.sync.trouble)
        shape = self._context.architecture
        routes = bool(shape.moe_layers)
        for request in requests:
            check_request(request, context=shape.max_positions, vocabulary=shape.vocab_size, routes=routes)
        async with contextlib.aclosing(running.requests.run(requests)) as results:
            async for result in results:
                yield result

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._started().requests.abort(request_ids)

    def pause(self) -> None:
        self._control("/pause_generation", {"mode": self._settings.pause_mode})
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._control("/continue_generation", self._continue())

    def flush(self) -> None:
        # A server that pauses in place has no prefix cache, and what runs there keeps its keys and values.
        if self._settings.pause_mode == "retract":
            self._control("/flush_cache", {})

    # --- weights ---

    def update_weights(self, stream: WeightStream, version: int) -> dict[str, str]:
        """Meet `Engine.update_weights`.

        A server that dies in the middle is started again and loaded from the kept weights. Raises EngineError if that
        fails too.
        """
        running = self._started()
        digests, failure = running.sync.update(running.servers, stream, version)
        if failure is not None:
            for server in running.servers:
                self._recover(server)
            running.sync.reload(running.servers)
        return digests

    def fingerprint(self) -> dict[str, str]:
        running = self._started()
        digests, *others = at_once(lambda server: server.digests(self._layout), running.servers)
        for number, other in enumerate(others, start=1):
            for name in digests.keys() | other.keys():
                if digests.get(name) != other.get(name):
                    digests[name] = f"{digests.get(name)}, but {other.get(name)} in server {number}"
        return digests

    # --- within ---

    def _started(self) -> _Running:
        if self._running is None:
            raise EngineError("the sglang engine is not started, or closed")
        return self._running

    def _continue(self) -> dict[str, Any]:
        return {"torch_empty_cache": self._context.device == "cuda"}

    def _process(self, number: int) -> ServerProcess:
        settings, context = self._settings, self._context
        alone = context.address is None
        return ServerProcess(
            server_command(settings, context, number, self._layout.told),
            host="127.0.0.1" if alone else every_interface(self._address),
            address="127.0.0.1" if alone else self._address,
            fixed_port=settings.port + number if settings.port else None,
            log_file=context.folder / (f"sglang.{number}.log" if number else "sglang.log"),
            environment=server_environment(settings, context),
            start_timeout=settings.start_timeout_s,
        )

    def _decode(self, request: GenerateRequest, answer: dict[str, Any]) -> GenerateResult:
        return decode_result(request, answer, self._context.architecture, self._settings.pause_mode)

    def _start_server(self, server: Server, *arguments: str) -> None:
        server.start(*arguments)
        self._check(server)
        if server.process is None and not str(server.info()["weight_version"]).isdigit():
            server.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})

    def _check(self, server: Server) -> None:
        """Raise UserError unless the server is what the settings say and holds what the checkpoint gives."""
        context, info, where = self._context, server.info(), f"SGLang server at {server.url}"
        wanted: dict[str, Any] = {
            "tp_size": self._settings.tensor_parallel,
            "device": context.device,
            "dtype": dtype_of(self._settings, context),
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
        }
        if context.architecture.moe_layers:
            wanted["enable_return_routed_experts"] = True
        if self._settings.pause_mode == "in_place":
            wanted["disable_radix_cache"] = True
        for key, value in wanted.items():
            if info.get(key) != value:
                raise UserError(f"{where} runs with {key}={info.get(key)}, expected {value}")
        length = context.architecture.max_positions
        if info["max_req_input_len"] < length:
            raise UserError(
                f"{where} holds {info['max_req_input_len']} tokens of one request, fewer than the model's context of "
                f"{length}: raise engine.max_total_tokens, or start it with a longer context"
            )
        expected = expected_names(context.model_path, self._layout)
        held = server.digests(self._layout).keys()
        if expected != held:
            raise UserError(
                f"{where} doesn't hold what {context.model_path} gives: it would sample with random "
                f"values for {sorted(held - expected) or 'nothing'} and without "
                f"{sorted(expected - held) or 'nothing'}. Is it a server of another model, or of one whose config.json "
                f"lacks what SGLang reads ({json.dumps(self._layout.told)})?"
            )

    def _control(self, path: str, body: dict[str, Any]) -> None:
        """POST to all servers at once; one that died is started again first."""

        def call(server: Server) -> None:
            try:
                server.post(path, body)
            except httpx.TransportError:
                self._recover(server)
                server.post(path, body)

        try:
            at_once(call, self._started().servers)
        except httpx.TransportError as error:
            raise EngineError(f"SGLang: {path} failed: {error!r}") from error

    def _recover(self, server: Server) -> None:
        """Return when asking a server again that did not answer makes sense; raise if it does not.

        A managed one that ended is started again with the last weights, paused if the engine is. A given one may
        be started again by whoever manages it.
        """
        with server.lock:
            if server.await_answer_or_death(self._settings.start_timeout_s):
                return
            if server.process is None:
                raise EngineError(f"SGLang server at {server.url} is gone")
            running = self._started()
            if server.restarts >= MAX_RESTARTS:
                raise EngineError(
                    f"{server.process.describe()}, after {server.restarts} restarts; its last lines:\n"
                    f"{server.process.log_tail()}"
                )
            server.restarts += 1
            server.process.stop()
            # Whatever it samples before it has its weights again (for another replica) carries a version that
            # `decode_spans` refuses.
            self._start_server(server, *(["--weight-version", "none"] if running.sync.version else []))
            running.sync.reload([server])
            if self._paused:
                server.post("/pause_generation", {"mode": self._settings.pause_mode})


class _Running:
    """What exists between `start` and `close`."""

    def __init__(self, servers: list[Server], engine: SGLangEngine) -> None:
        settings, context = engine._settings, engine._context
        self.servers = servers
        transport: Transport = HttpTransport(settings.tensor_parallel)
        if settings.transport == "broadcast":
            backend = "gloo" if context.device == "cpu" else "nccl"
            transport = BroadcastTransport(settings.tensor_parallel, backend=backend, address=engine._address)
        self.sync = WeightSync(
            transport,
            engine._layout,
            dtype=getattr(torch, dtype_of(settings, context)),
            device=context.device,
            flush=settings.pause_mode == "retract",
        )
        self.requests = RequestRunner(
            servers,
            engine._decode,
            engine._recover,
            concurrency=2 * settings.max_running_requests * len(servers),
            patience=settings.start_timeout_s,
        )
