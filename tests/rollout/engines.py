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

from megarl.rollout.embedded.settings import EmbeddedSettings
from megarl.rollout.engine import Engine
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.settings import SGLangSettings
from tests.rollout.reference import Reference
from tests.rollout.scripted import ScriptedModel, ScriptedSettings, context_of, read_weights

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"


@dataclass(frozen=True)
class EngineEntry:
    """make: from the model folder and a folder for the engine's own files. reference: what a model folder's weights
    say about a response."""

    name: str
    make: Callable[[Path, Path], Engine]
    reference: Callable[[Path], Reference | ScriptedModel] = Reference
    marks: tuple[pytest.MarkDecorator, ...] = ()


def make_embedded(model: Path, work: Path) -> Engine:
    return EmbeddedSettings().make(context_of(model, work))


def make_scripted(model: Path, work: Path) -> Engine:
    return ScriptedSettings().make(context_of(model, work))


def scripted_reference(model: Path) -> ScriptedModel:
    return ScriptedModel(read_weights(model), context_of(model, model).architecture)


def make_sglang(model: Path, work: Path, **settings: Any) -> SGLangEngine:
    """A managed server. settings: of `SGLangSettings`."""
    chosen: dict[str, Any] = {
        "python": str(find_sglang()),
        "max_running_requests": 8,
        "start_timeout_s": 600,
        **settings,
    }
    return SGLangEngine(SGLangSettings(**chosen), context_of(model, work))


def leaders_of(engine: SGLangEngine) -> list[int]:
    """The process groups of the servers that it manages."""
    processes = [server.process for server in engine._started().servers]
    return [process.pid for process in processes if process and process.pid is not None]


def find_sglang() -> Path:
    """The interpreter of SGLang's environment; skips the test if there is none."""
    if not SGLANG_PYTHON.exists():
        pytest.skip(
            f"no SGLang environment: build it with `launch/install_sglang.sh cpu {SGLANG_PYTHON.parents[1]}`"
        )
    return SGLANG_PYTHON


ENGINES = (
    EngineEntry("scripted", make_scripted, scripted_reference),
    EngineEntry("embedded", make_embedded),
    EngineEntry("sglang", make_sglang, marks=(pytest.mark.sglang,)),
)
