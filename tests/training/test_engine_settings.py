"""Where the servers of a run listen."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from megarl.config.load import make_config
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.training.engines import engine_context
from megarl.weights.families import family_of

TORCHRUN = {"WORLD_SIZE": "4", "MASTER_ADDR": "node0"}


@pytest.mark.parametrize(
    ("ranks_here", "engine_words", "host", "address"),
    [
        ("4", {}, "127.0.0.1", "127.0.0.1"),
        ("2", {}, "0.0.0.0", "node0"),
        ("2", {"address": "10.0.0.7", "transport": "broadcast"}, "0.0.0.0", "10.0.0.7"),
    ],
)
def test_replicas_on_other_nodes_reach_the_servers_of_the_first(
    ranks_here: str,
    engine_words: dict[str, str],
    host: str,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": ranks_here}.items():
        monkeypatch.setenv(name, value)
    python = tmp_path / "python"
    python.touch(mode=0o755)
    made = Qwen3MoeConfig(num_hidden_layers=2, architectures=["Qwen3MoeForCausalLM"])
    made.save_pretrained(tmp_path)
    config = make_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {"sources": [{"kind": "reasoning_gym", "task": "chain_sum"}]},
            "engine": {"kind": "sglang", "python": str(python), **engine_words},
        }
    )
    hf = made.to_dict()
    architecture = family_of(hf).architecture(hf)
    context = engine_context(config, architecture, model_path=tmp_path, folder=tmp_path, dtype=torch.float32)
    engine = config.engine.make(context)
    assert isinstance(engine, SGLangEngine)
    server = engine._process(0)
    assert (server.host, server.address) == (host, address)
    assert engine._settings.transport == engine_words.get("transport", "http")
