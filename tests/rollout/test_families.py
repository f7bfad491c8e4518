"""Every model family behind both engines: its weights arrive, and what is sampled is what transformers says of them;
then a tiny run of the real command, with the engine's routes replayed where there are experts.

The suite has one family of each layout that SGLang makes of them, and two runs; `--all-families` has all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.rollout.embedded.model import is_experts
from megarl.rollout.embedded.settings import EmbeddedSettings
from megarl.rollout.engine import Engine
from megarl.rollout.sglang import sync
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.settings import SGLangSettings
from tests.forks import ROOT, run_megarl
from tests.models import VOCABULARY, tiny_tokenizer
from tests.rollout.forked import ForkedServers
from tests.rollout.scripted import context_of
from tests.rollout.test_engine_contract import generate, make_request, updating
from tests.weights.families import FAMILIES, make

CLOSE = 1e-4  # log-probabilities in float32
TOKENS = {"vocab_size": VOCABULARY, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 3}
IN_SGLANG: dict[str, dict[str, Any]] = {  # what SGLang has no other variant of
    "qwen3-moe": {"mlp_only_layers": []},
    "olmoe": {"num_key_value_heads": 4},
    "moonlight": {"rms_norm_eps": 1e-6},  # of the latents, too
    "glm-4.7-flash": {"rms_norm_eps": 1e-6},
}
LAYOUTS = ("qwen2-moe", "mixtral", "deepseek-v2-lite", "deepseek-v3", "glm-4.5", "glm-4.7-flash")
RUNS = ("mixtral", "glm-4.7-flash")
CONFIG = """
defaults: [{quickstart}]
launch: {{ranks: 1}}
parallel: {{expert: 1}}
model: {{path: {model}}}
data: {{heldout: {{count: 2}}}}
rewards:
  shaping:
    - {{name: letters, verifier: regex, options: {{pattern: '[a-z]'}}}}
    - {{name: capitals, verifier: regex, options: {{pattern: '[A-Z]'}}}}
    - {{name: digits, verifier: regex, options: {{pattern: '[0-9]'}}}}
    - {{name: signs, verifier: regex, options: {{pattern: '[!-/:-@]'}}}}
sft: {{steps: 0}}
rl: {{steps: 2, prompts_per_step: 4, group_size: 4, minibatches: 1, optimizer: {{lr: 1.0e-3}}}}
algorithm: {{name: grpo, kl: none, old_logprobs: engine, routing_replay: {replay}}}
sampling: {{max_new_tokens: 8}}
evaluation: {{every: 0}}
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServers]:
    servers = ForkedServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


def models(name: str, folder: Path, **fields: Any) -> tuple[Path, Path]:
    """The family's tiny model, and the same with other weights."""
    old, new = (make(name, folder / f"{name}-{n}", seed=n, **TOKENS, **fields) for n in (0, 1))
    tiny_tokenizer().save_pretrained(old)
    return old, new


def reference(folder: Path, tokens: np.ndarray) -> tuple[torch.Tensor, np.ndarray | None]:
    """transformers' log-probabilities, and its routes as a trace has them, each row in ascending order."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for module in filter(is_experts, model.modules()):
        module.register_forward_pre_hook(lambda module, inputs: chosen.append(inputs[1]))
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs, torch.stack(chosen, 1)[:-1].sort(-1).values.numpy() if chosen else None


def check_sync(engine: Engine, newer: Path, *, moe: bool) -> None:
    with updating(engine):
        intended = engine.update_weights(load_file(newer / "model.safetensors").items(), 1)
    assert engine.fingerprint() == intended
    requests = [make_request(f"r{n}", 20 + n, max_new_tokens=12, routes=moe) for n in range(2)]
    for request in requests:
        result = generate(engine, request)[request.request_id]
        logprobs, routes = reference(newer, np.concatenate([request.token_ids, result.response_ids]))
        np.testing.assert_allclose(result.logprobs, logprobs[len(request.token_ids) - 1 :], atol=CLOSE)
        if moe:
            assert result.routes is not None
            np.testing.assert_array_equal(np.sort(result.routes.experts, -1), routes)


def check_run(model: Path, folder: Path, engine: str, *, moe: bool) -> None:
    """Two steps, of which the second samples by weights that the first has changed."""
    file, run = folder / "run.yaml", folder / "run"
    quickstart = ROOT / "configs" / "quickstart.yaml"
    replay = "engine" if moe else "off"
    file.write_text(CONFIG.format(quickstart=quickstart, model=model, replay=replay) + f"engine: {engine}\n")
    done = run_megarl("train", str(file), f"folder={run}", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert first["train/grad_norm"] > 0
    assert second["sync/version"] == 2
    for row in (first, second):
        assert row["mismatch/tokens"] > 0
        assert row["mismatch/abs_diff_max"] < CLOSE


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The families with a run."""
    return tuple(FAMILIES) if request.config.getoption("--all-families", default=False) else RUNS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "served" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-families", default=False)
        metafunc.parametrize("served", tuple(FAMILIES) if every else LAYOUTS)


@pytest.mark.sglang
def test_sglang_holds_and_samples_every_family(
    served: str,
    servers: ForkedServers,
    runs: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync, "BUCKET_BYTES", 4000)  # every matrix is alone, but what must come together
    old, newer = models(served, tmp_path, **IN_SGLANG.get(served, {}))
    moe = FAMILIES[served].moe
    with servers.serving(old) as url:
        engine = SGLangEngine(SGLangSettings(urls=(url,)), context_of(old, tmp_path))
        engine.start()
        check_sync(engine, newer, moe=moe)
        engine.close()
        if served in runs:
            check_run(old, tmp_path, f"{{kind: sglang, urls: ['{url}']}}", moe=moe)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_embedded_engine_holds_and_samples_every_family(
    name: str, runs: tuple[str, ...], tmp_path: Path
) -> None:
    old, newer = models(name, tmp_path)
    moe = FAMILIES[name].moe
    engine = EmbeddedSettings().make(context_of(old, tmp_path))
    engine.start()
    check_sync(engine, newer, moe=moe)
    if name in runs:
        check_run(old, tmp_path, "{kind: embedded}", moe=moe)
