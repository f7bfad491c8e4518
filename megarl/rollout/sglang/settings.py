"""The `sglang` engine's settings: which servers, and how they are started. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from megarl.errors import UserError
from megarl.rollout.declaration import EngineContext, EngineSettings
from megarl.settings import HomePath, expand_home

if TYPE_CHECKING:
    from megarl.megatron.architecture import Architecture
    from megarl.rollout.engine import Engine


PauseMode = Literal["retract", "in_place"]


class SGLangSettings(EngineSettings):
    """SGLang servers, started, watched and stopped by megarl in an environment of their own, or given by URL."""

    shared: ClassVar[bool] = True

    kind: Literal["sglang"] = Field(default="sglang", description="SGLang's servers.")
    python: HomePath | None = Field(
        default=None,
        description="Python of SGLang's environment; None = .venv-sglang/bin/python in the project's or this folder.",
    )
    servers: int = Field(default=1, ge=1, description="Managed servers; replicas share them in turn.")
    urls: tuple[str, ...] = Field(default=(), description="Servers that already run; none is started then.")
    tensor_parallel: int = Field(default=1, ge=1, description="Tensor parallelism of each server.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto = the trainer's.")
    port: int | None = Field(default=None, ge=1, le=65535, description="First port; None = any free one.")
    max_running_requests: int = Field(default=16, ge=1, description="Responses decoded together by a server.")
    max_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of key-value cache; None = room for max_running_requests full contexts on a CPU, SGLang's "
        "own choice from the free memory on CUDA.",
    )
    start_timeout_s: float = Field(default=300, gt=0, description="Longest wait for a server to be ready.")
    pause_mode: PauseMode = Field(
        default="retract",
        description="What a weight sync does with responses under way: retract = compute their keys and values anew "
        "with the new weights; in_place = go on with those of the old ones, which is faster, and samples from a "
        "mixture of both policies. The latter needs servers without a prefix cache.",
    )
    transport: Literal["http", "broadcast"] = Field(
        default="http",
        description="How weights get into the servers: http = requests, for CPUs and small models; broadcast = a "
        "process group with them (gloo, NCCL), for clusters.",
    )
    address: str | None = Field(
        default=None,
        description="Where other machines reach this one; None = MASTER_ADDR on several nodes, else 127.0.0.1.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Further launch_server arguments by name; they win over megarl's."
    )

    @field_validator("args")
    @classmethod
    def _with_homes(cls, args: dict[str, Any]) -> dict[str, Any]:
        """No shell stands between these words and the server."""
        return {k: expand_home(v) if isinstance(v, str) and v.startswith("~") else v for k, v in args.items()}

    @field_validator("port")
    @classmethod
    def _of_managed_servers(cls, port: int | None, info: ValidationInfo) -> int | None:
        if port is not None and info.data.get("urls"):
            raise ValueError(
                "it is for servers that megarl starts, engine.urls for servers that already run: set one of them"
            )
        return port

    @field_validator("urls")
    @classmethod
    def _of_servers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        from megarl.rewards.http import check_url

        for number, url in enumerate(urls):
            try:
                check_url(url, key=f"number {number},")
            except UserError as error:
                raise ValueError(str(error)) from None
        return urls

    @field_validator("address")
    @classmethod
    def _of_a_host(cls, address: str | None) -> str | None:
        if address is not None and (
            not re.fullmatch(r"[\w.:%-]+|\[[\w.:%]+\]", address) or address.count(":") == 1
        ):
            raise ValueError(
                f"{address!r} is no host: give a name or an IP address alone, without http:// and port"
            )
        return address

    def check(self, architecture: Architecture, *, gpus: int) -> None:
        degree, shape = self.tensor_parallel, architecture.transformer
        heads, dense = shape["num_attention_heads"], len(architecture.moe_layers) < shape["num_layers"]
        splits = [
            (heads, "attention heads"),
            (dense and shape["ffn_hidden_size"], "rows of a dense layer"),
            (architecture.num_experts and shape["moe_ffn_hidden_size"], "rows of an expert"),
        ]
        for size, what in splits:
            if size and size % degree:
                raise UserError(f"engine.tensor_parallel: {degree} does not divide the model's {size} {what}")
        keys = shape.get("num_query_groups") or heads
        if keys % degree and degree % keys:
            raise UserError(
                f"engine.tensor_parallel: {degree} and the model's {keys} key heads do not divide"
            )
        if degree > 1 and architecture.qk_norm_over_heads:
            raise UserError(
                f"engine.tensor_parallel: {degree}, but SGLang cannot split this model's norms over all heads at once: "
                "set 1"
            )
        if self.urls:
            return
        self.find_python()
        if gpus and self.servers * degree > gpus:
            raise UserError(
                f"engine.servers: {self.servers} servers x tensor_parallel {degree} need {self.servers * degree} GPUs, "
                f"this machine has {gpus}, and megarl starts servers on the first node alone: start others yourself, "
                "and name them in engine.urls"
            )

    def check_model(self, folder: Path, *, device: Literal["cpu", "cuda"]) -> None:
        from megarl.rollout.sglang.layout import FusedLayout, check_variant

        check_variant(folder)
        FusedLayout.of(folder, tp_size=self.tensor_parallel, device=device)

    def make(self, context: EngineContext, urls: Sequence[str] = ()) -> Engine:
        from megarl.rollout.sglang.engine import SGLangEngine

        return SGLangEngine(self.model_copy(update={"urls": tuple(urls)}) if urls else self, context)

    def find_python(self) -> Path:
        """Return the interpreter of SGLang's environment. Raises UserError that says how to build one."""
        folders = (Path.cwd(), Path(__file__).resolve().parents[3])
        usual = [folder / ".venv-sglang" / "bin" / "python" for folder in folders]
        candidates = [Path(self.python)] if self.python else usual
        for path in candidates:
            if os.access(path, os.X_OK):
                return path
        raise UserError(
            f"engine.python: SGLang's environment is missing ({' and '.join(map(str, candidates))} not found): build "
            "it with launch/install_sglang.sh, or set engine.python to its interpreter"
        )
