"""Real SGLang servers beyond the contract: their death, their log, given URLs, other layouts, the second
transport.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megarl.errors import UserError
from megarl.rollout.engine import EngineError
from megarl.rollout.sglang import supervise, sync
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.settings import SGLangSettings
from tests.models import tiny_qwen3, tiny_qwen3_moe
from tests.rollout.engines import ENGINES, EngineEntry, find_sglang, leaders_of, make_sglang
from tests.rollout.reference import Reference, checkpoint_weights
from tests.rollout.scripted import context_of
from tests.rollout.test_engine_contract import CLOSE, generate, iterate, make_request, updating
from tests.rollout.test_sglang_process import alive, wait_for_the_end

pytestmark = pytest.mark.sglang


@pytest.fixture
def entry() -> EngineEntry:
    """The session's managed server is shared with the contract suite."""
    return next(entry for entry in ENGINES if entry.name == "sglang")


def process_group(engine: SGLangEngine) -> list[int]:
    """Process ids of the first server: the supervisor, SGLang and its children."""
    leader = leaders_of(engine)[0]
    return [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]


def segments_of(engine: SGLangEngine) -> list[Path]:
    """What its servers have in shared memory."""
    names = {name for leader in leaders_of(engine) for name in supervise.segments(leader, ())}
    return [supervise.SHARED_MEMORY / name for name in sorted(names)]


def attached(
    engine: SGLangEngine, model: Path, context: dict[str, Any] | None = None, **settings: Any
) -> SGLangEngine:
    """An engine that is given the running server's URL. context: changes of `context_of`; settings: of
    `SGLangSettings`."""
    made = context_of(model, Path("/nowhere"), **(context or {}))
    return SGLangEngine(SGLangSettings(urls=engine.urls(), **settings), made)


def test_a_killed_server_is_started_again_with_the_last_weights_and_its_requests_are_retried(
    engine: SGLangEngine, newer_policy: Path, newer_reference: Reference
) -> None:
    version = engine.weight_version + 1
    with updating(engine):
        intended = engine.update_weights(checkpoint_weights(newer_policy).items(), version)
    first = process_group(engine)
    requests = [make_request(f"r{n}", 5 + n, max_new_tokens=150, routes=True) for n in range(3)]
    results = {}
    for result in iterate(engine.generate([*requests, make_request("signal", 4, max_new_tokens=3)])):
        results[result.request_id] = result
        if result.request_id == "signal":
            os.killpg(first[0], signal.SIGKILL)
            health = engine.health() or ""
            assert "killed by signal 9" in health or "does not answer" in health  # yet, the new one
    assert not alive(first)
    assert engine.health() is None
    assert engine.weight_version == version
    assert engine.fingerprint() == intended
    for request in requests:
        result = results[request.request_id]
        assert len(result.response_ids) == 150
        assert [span.version for span in result.spans] == [version]
        np.testing.assert_allclose(result.logprobs, newer_reference.logprobs(request, result), atol=CLOSE)


def test_weights_reach_a_given_server_by_broadcast_too(
    engine: SGLangEngine, newer_policy: Path, newer_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "BUCKET_BYTES", 100_000)
    given = attached(engine, newer_policy, transport="broadcast")
    given.start()
    for version in (1, 2):
        with updating(given):
            intended = given.update_weights(checkpoint_weights(newer_policy).items(), version)
        assert given.fingerprint() == intended
    request = make_request("r", 20)
    result = generate(given, request)["r"]
    np.testing.assert_allclose(result.logprobs, newer_reference.logprobs(request, result), atol=CLOSE)
    given.close()
    # A given server is not ours to stop.
    assert engine.health() is None
    engine.update_weights(checkpoint_weights(newer_policy).items(), engine.weight_version + 1)


def test_a_stream_of_unknown_names_is_noticed_though_sglang_swallows_it(
    engine: SGLangEngine, policy: Path
) -> None:
    weights = checkpoint_weights(policy)
    wrong = {name.replace("self_attn", "attention"): tensor + 1 for name, tensor in weights.items()}
    with updating(engine):
        assert engine.update_weights(wrong.items(), engine.weight_version + 1) != engine.fingerprint()


def test_an_update_whose_stream_breaks_off_leaves_the_engine_able_to_take_the_next(
    engine: SGLangEngine, policy: Path
) -> None:
    weights = checkpoint_weights(policy)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:5]
        raise RuntimeError("a rank died")

    version = engine.weight_version
    with updating(engine):
        with pytest.raises(RuntimeError, match="a rank died"):
            engine.update_weights(broken(), version + 1)
        assert engine.weight_version == version
        with pytest.raises(EngineError, match="broke off"):  # nothing is sampled by half-loaded weights
            generate(engine, make_request("r", 4))
        intended = engine.update_weights(weights.items(), version + 1)
    assert engine.fingerprint() == intended


def test_a_checkpoint_that_sglang_would_fill_with_random_values_is_refused(
    engine: SGLangEngine, tmp_path: Path
) -> None:
    dense_layer = attached(engine, tiny_qwen3_moe(tmp_path, mlp_only_layers=[1]))
    with pytest.raises(
        UserError, match=r"random values for .*layers\.1\.mlp\.experts.* without .*gate_up_proj"
    ):
        dense_layer.start()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dtype": "bfloat16"}, "dtype=float32, expected bfloat16"),
        ({"tensor_parallel": 2, "context": {"device": "cuda"}}, "tp_size=1, expected 2"),
        ({"pause_mode": "in_place"}, "disable_radix_cache"),
        ({"context": {"max_positions": 100_000}}, "context of 100000"),
    ],
)
def test_a_given_server_with_other_settings_is_refused(
    engine: SGLangEngine, policy: Path, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        attached(engine, policy, **settings).start()


def test_an_engine_that_is_not_started_says_so(policy: Path, tmp_path: Path) -> None:
    engine = make_sglang(policy, tmp_path)
    with pytest.raises(EngineError, match="not started"):
        engine.pause()
    assert engine.health() == "the sglang engine is not started"
    engine.close()


PARENT = """
import sys
from pathlib import Path
from megarl.rollout.sglang.settings import SGLangSettings
from tests.rollout.scripted import context_of
model, work = map(Path, sys.argv[2:])
SGLangSettings(python=sys.argv[1]).make(context_of(model, work)).start()
"""


def test_killing_megarl_while_a_server_starts_leaves_no_orphan(policy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(find_sglang()), str(policy), str(tmp_path)]
    parent = psutil.Process(subprocess.Popen(command).pid)
    family: list[int] = []
    deadline = time.monotonic() + 300
    while len(family) < 2 and time.monotonic() < deadline:  # the supervisor and SGLang
        time.sleep(0.2)
        family = [child.pid for child in parent.children(recursive=True)]
    assert len(family) >= 2
    time.sleep(3)
    family = [child.pid for child in parent.children(recursive=True)]
    parent.kill()
    wait_for_the_end(family)
    os.waitpid(parent.pid, 0)


def test_a_dense_model_in_bfloat16_with_tied_embeddings_is_proved_and_pauses_in_place(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "old", tie_word_embeddings=True)
    newer = tiny_qwen3(tmp_path / "new", tie_word_embeddings=True, seed=1)
    engine = make_sglang(model, tmp_path, pause_mode="in_place", dtype="bfloat16", max_running_requests=2)
    try:
        engine.start()
        assert engine.update_weights(checkpoint_weights(model).items(), 1) == engine.fingerprint()
        request = make_request("long", 9, max_new_tokens=150)
        results = {}
        for result in iterate(engine.generate([request, make_request("signal", 5, max_new_tokens=10)])):
            results[result.request_id] = result
            if result.request_id == "signal":
                with updating(engine):
                    engine.flush()
                    intended = engine.update_weights(checkpoint_weights(newer).items(), 2)
                    assert engine.fingerprint() == intended
        long = results["long"]
        assert [span.version for span in long.spans] == [1, 2]
        # bfloat16 against float32: close, as far as the old weights made it.
        change = long.spans[0].end
        assert np.abs(long.logprobs - Reference(model).logprobs(request, long))[:change].mean() < 0.2
        shared = segments_of(engine)
        assert any(path.name.startswith("sglang_loads_") for path in shared)
    finally:
        engine.close()
    assert not [path for path in shared if path.exists()]


@pytest.mark.slow
def test_each_rank_of_a_tensor_parallel_server_is_proved(tmp_path: Path) -> None:
    """There is one key-value head for two ranks, which a CPU server pads."""
    shape = {"moe_intermediate_size": 64, "num_key_value_heads": 1}
    model = tiny_qwen3_moe(tmp_path / "model", **shape)
    engine = make_sglang(model, tmp_path, tensor_parallel=2)
    try:
        engine.start()
        newer = tiny_qwen3_moe(tmp_path / "new", seed=1, **shape)
        intended = engine.update_weights(checkpoint_weights(newer).items(), 1)
        assert {name.partition("@")[2] for name in intended} == {"tp0", "tp1"}
        assert engine.fingerprint() == intended
        request = make_request("r", 20)
        result = generate(engine, request)["r"]
        np.testing.assert_allclose(result.logprobs, Reference(newer).logprobs(request, result), atol=CLOSE)
        shared = segments_of(engine)
        assert any(path.name.startswith("sgl_shm_mq_") for path in shared)
    finally:
        engine.close()
    assert not [path for path in shared if path.exists()]
