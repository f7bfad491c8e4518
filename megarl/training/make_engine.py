"""From the config's `engine` section to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megarl.config.schema import Config, SglangEngine
from megarl.errors import UserError
from megarl.megatron.model import Architecture
from megarl.rollout.engine import Engine

EngineMaker = Callable[[Sequence[str]], Engine]


def check_engine(config: Config, architecture: Architecture) -> None:
    """Raises UserError for servers that cannot hold the model, or that this machine cannot start."""
    settings = config.engine
    if not isinstance(settings, SglangEngine):
        return
    degree, shape = settings.tensor_parallel, architecture.transformer
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
        raise UserError(f"engine.tensor_parallel: {degree} and the model's {keys} key heads do not divide")
    if settings.urls:
        return
    find_sglang_python(settings.python)
    if config.platform != "cpu" and torch.cuda.is_available():
        need, gpus = settings.servers * degree, torch.cuda.device_count()
        if need > gpus:
            raise UserError(
                f"engine.servers: {settings.servers} servers x tensor_parallel {degree} need {need} GPUs, this machine "
                f"has {gpus}, and megarl starts servers on the first node alone: start others yourself, and name them "
                "in engine.urls"
            )


def several_nodes() -> bool:
    """Whether torchrun's ranks are spread over machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < int(os.environ.get("WORLD_SIZE", 1))


def engine_maker(
    config: Config, folder: Path, start: Path, architecture: Architecture, dtype: torch.dtype
) -> EngineMaker:
    """make(urls): an engine; with URLs, a client of servers that another replica manages.

    start: the HF folder whose config, tokenizer and first weights the engine loads.
    """
    settings = config.engine
    device = "cpu" if config.platform == "cpu" or not torch.cuda.is_available() else "cuda"

    def make_embedded(urls: Sequence[str]) -> Engine:
        from megarl.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine(start, dtype=dtype, slots=settings.slots, device=device, seed=config.seed)  # type: ignore[union-attr]

    def make_sglang(urls: Sequence[str]) -> Engine:
        from megarl.rollout.sglang import SGLangEngine, SGLangSettings

        assert isinstance(settings, SglangEngine)
        given = tuple(urls or settings.urls)
        # The servers are rank 0's, on the node that the others know as MASTER_ADDR; replicas on them must reach it.
        address = settings.address or (os.environ["MASTER_ADDR"] if several_nodes() else "127.0.0.1")
        return SGLangEngine(
            SGLangSettings(
                model_path=start,
                python=None if given else find_sglang_python(settings.python),
                urls=given,
                servers=settings.servers,
                log_file=folder / "sglang.log",
                device=device,  # type: ignore[arg-type]
                dtype=str(dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype,
                context_length=architecture.max_positions,
                max_running_requests=settings.max_running_requests,
                max_total_tokens=settings.max_total_tokens,
                tp_size=settings.tensor_parallel,
                host="0.0.0.0" if several_nodes() else "127.0.0.1",
                address=address,
                port=settings.port,
                seed=config.seed,
                extra_args=tuple(_flags(settings)),
                start_timeout=settings.start_timeout_s,
                transport=settings.transport,
            ),
            moe_layers=architecture.moe_layers,
            experts=architecture.num_experts,
        )

    return make_embedded if settings.kind == "embedded" else make_sglang


def find_sglang_python(given: str | None) -> Path:
    """The interpreter of SGLang's environment. Raises UserError that says how to build one."""
    project = Path(__file__).resolve().parents[2]
    places = (
        [Path(given)]
        if given
        else [base / ".venv-sglang" / "bin" / "python" for base in (Path.cwd(), project)]
    )
    for place in places:
        if place.exists():
            return place
    raise UserError(
        f"engine.python: SGLang's environment is missing ({' and '.join(map(str, places))} not found): build it with "
        "launch/install_sglang.sh, or set engine.python to its interpreter"
    )


def _flags(settings: SglangEngine) -> list[str]:
    """`engine.args` as words of the command line."""
    words: list[str] = []
    for name, value in settings.args.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words
