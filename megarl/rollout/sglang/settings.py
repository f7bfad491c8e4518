"""What the `sglang` engine is told: which servers, how they are started, how they are treated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megarl.errors import UserError
from megarl.rollout.sglang.layout import read_config
from megarl.rollout.sglang.wire import PauseMode

# SGLang keeps back up to 7 tokens of its context length; it is told more so that all of ours can be used.
SPARE_CONTEXT = 8


@dataclass(frozen=True)
class SGLangSettings:
    """Settings of the `sglang` engine; the defaults suit a CPU and a small model. Times are seconds.

    Which servers
    model_path: Hugging Face folder that the servers load; its config.json is read here too.
    python: interpreter of SGLang's own environment; megarl starts the servers with it.
    urls: servers that run already, instead of `python`. megarl never starts or stops these.
    servers: how many to start; requests go to the least busy one.

    How they are started
    log_file: output of the first server; further ones get a number before the suffix.
    device: "cpu" or "cuda". dtype: of weights and computation, as torch names it ("float32", "bfloat16").
    context_length: most tokens of prompt and response together; None = what the checkpoint allows.
    max_running_requests: sampled at once by one server; twice as many are sent, the rest waits here.
    max_total_tokens: size of a server's key-value cache in tokens; None = room for `max_running_requests` full
        contexts on a CPU, SGLang's choice from the free memory on CUDA.
    tp_size: tensor-parallel ranks of one server.
    host: what they listen on, "0.0.0.0" for all interfaces. address: this machine as other machines see it.
    port: of the first server, the next ones follow; None = free ports.
    seed: of the servers' sampling.
    extra_args: appended to SGLang's command line, so that they win. environment: added to the servers' variables.
    start_timeout: until a server must answer, also when it was restarted.

    How they are treated
    request_timeout: longest wait for one response. retries: of a request whose connection broke, after pauses of
        `backoff`, twice that, ... max_restarts: how often one server is started again before giving up.
    pause_mode: "retract" (waiting requests are prefilled again with the new weights) or "in_place" (they keep keys
        and values of the old weights; faster, and the policy that samples is then a mixture).
    transport: "http" or "broadcast", see `transports`. bucket_bytes: of weights sent at once.
    keep_weights: hold the last weights in host memory, so that a server started again gets them at once; without,
        `generate` raises EngineError until the next `update_weights`.
    """

    model_path: Path
    python: Path | None = None
    urls: tuple[str, ...] = ()
    servers: int = 1

    log_file: Path = Path("sglang.log")
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    context_length: int | None = None
    max_running_requests: int = 16
    max_total_tokens: int | None = None
    tp_size: int = 1
    host: str = "127.0.0.1"
    port: int | None = None
    seed: int = 0
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 600.0

    request_timeout: float = 3600.0
    retries: int = 3
    backoff: float = 0.5
    max_restarts: int = 3
    pause_mode: PauseMode = "retract"
    transport: Literal["http", "broadcast"] = "http"
    address: str = "127.0.0.1"
    bucket_bytes: int = 128 << 20
    keep_weights: bool = True

    def __post_init__(self) -> None:
        if bool(self.urls) == (self.python is not None):
            raise UserError(
                "sglang engine: set either `python` (megarl starts the servers) or `urls` (they run)"
            )
        for name in ("servers", "max_running_requests", "tp_size", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"sglang engine: {name} must be at least 1, not {getattr(self, name)}")

    def resolve_context_length(self) -> int:
        """`context_length`, by default the checkpoint's `max_position_embeddings`."""
        if self.context_length is not None:
            return self.context_length
        config = read_config(self.model_path)
        if "max_position_embeddings" not in config:
            raise UserError(
                f"{self.model_path}/config.json names no max_position_embeddings: set context_length"
            )
        return int(config["max_position_embeddings"])

    def log_file_of(self, server: int) -> Path:
        if server == 0:
            return self.log_file
        return self.log_file.with_name(f"{self.log_file.stem}.{server}{self.log_file.suffix}")

    def command(self, server: int, *, routes: bool) -> list[str]:
        """The command line that starts server number `server`, without host and port.

        Raises UserError if there is no such interpreter.
        """
        if self.python is None or not os.access(self.python, os.X_OK):
            raise UserError(
                f"SGLang's environment is missing: {self.python} is not an executable. Build it with "
                f"`launch/install_sglang.sh {self.device} FOLDER` and name FOLDER/bin/python"
            )
        context = self.resolve_context_length() + SPARE_CONTEXT
        tokens = self.max_total_tokens
        if tokens is None and self.device == "cpu":
            tokens = self.max_running_requests * context
        options: list[tuple[str, object]] = [
            ("--model-path", self.model_path),
            ("--dtype", self.dtype),
            ("--context-length", context),
            ("--max-running-requests", self.max_running_requests),
            ("--tp-size", self.tp_size),
            ("--random-seed", self.seed + server),
            ("--weight-version", 0),
            ("--sampling-defaults", "openai"),
            ("--log-level-http", "warning"),
            ("--decode-log-interval", 1000),
        ]
        if tokens is not None:
            options.append(("--max-total-tokens", tokens))
        if self.device == "cuda":
            options.append(("--base-gpu-id", server * self.tp_size))
        flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
        if routes:
            flags.append("--enable-return-routed-experts")
        if self.pause_mode == "in_place":
            flags.append("--disable-radix-cache")  # prefixes of old weights would be found in it
        module = "sglang_cpu" if self.device == "cpu" else "sglang.launch_server"
        words = [str(word) for option in options for word in option]
        return [str(self.python), "-m", module, *words, *flags, *self.extra_args]

    def server_environment(self) -> dict[str, str]:
        """Environment variables that a server gets beside the inherited ones."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # SPARE_CONTEXT, never used by a token
        }
        if self.device == "cpu" and self.tp_size > 1:
            cores = os.cpu_count() or 1
            bindings = "|".join(str(rank % cores) for rank in range(self.tp_size))
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = bindings
        return variables | dict(self.environment)
