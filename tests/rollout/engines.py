"""The engines that the contract suite runs against, one entry each.

An entry makes an engine that is not started, for a Hugging Face folder of a tiny Qwen3-MoE of which every
layer is a MoE layer (float32, a context of 512 tokens). What the engine needs beyond that it finds or skips
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.engine import Engine
from megarl.rollout.sglang import SGLangEngine, SGLangSettings
from tests.models import MOE_SHAPE, SHAPE

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"


@dataclass(frozen=True)
class EngineEntry:
    """make: from the model folder and a folder for the engine's own files."""

    name: str
    make: Callable[[Path, Path], Engine]
    marks: tuple[pytest.MarkDecorator, ...] = ()


def make_embedded(model: Path, work: Path) -> Engine:
    return EmbeddedEngine(model)


def make_sglang(model: Path, work: Path, **settings: Any) -> SGLangEngine:
    """A managed server; `settings` override those of `SGLangSettings`."""
    chosen: dict[str, Any] = {
        "model_path": model,
        "python": find_sglang(),
        "log_file": work / "sglang.log",
        "max_running_requests": 8,
        **settings,
    }
    return SGLangEngine(
        SGLangSettings(**chosen),
        moe_layers=range(SHAPE["num_hidden_layers"]),
        experts=MOE_SHAPE["num_experts"],
    )


def find_sglang() -> Path:
    """The interpreter of SGLang's environment; skips the test if there is none."""
    if not SGLANG_PYTHON.exists():
        pytest.skip(
            f"no SGLang environment: build it with `launch/install_sglang.sh cpu {SGLANG_PYTHON.parents[1]}`"
        )
    return SGLANG_PYTHON


ENGINES = (
    EngineEntry("embedded", make_embedded),
    EngineEntry("sglang", make_sglang, (pytest.mark.sglang,)),
)
