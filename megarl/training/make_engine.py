"""From the config's `engine` section to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megarl.config.schema import Config, SglangEngine
from megarl.errors import UserError
from megarl.megatron.model import Architecture
from megarl.rollout.engine import Engine

EngineMaker = Callable[[Sequence[str]], Engine]


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
                port=settings.port,
                seed=config.seed,
                extra_args=tuple(_flags(settings)),
                start_timeout=settings.start_timeout_s,
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
