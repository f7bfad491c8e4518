"""What the embedded engine promises beyond the contract: exact, reproducible, weights named as on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, OlmoeConfig, Qwen3Config

from megarl.errors import UserError
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.engine import EngineError, GenerateRequest, GenerateResult, SamplingParams, iterate
from megarl.weights.fingerprint import digest
from tests.models import VOCABULARY, randomize, tiny_qwen3, tiny_qwen3_moe


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, the middle one dense."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe"), mlp_only_layers=[1])


@pytest.fixture(scope="module")
def other_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_moe(tmp_path_factory.mktemp("other"), mlp_only_layers=[1], seed=1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("dense"), tie_word_embeddings=True)


def started(model: Path, **options: object) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, **options)  # type: ignore[arg-type]
    engine.start()
    return engine


def requests(
    count: int, *, tokens: int = 24, routes: bool = False, **sampling: object
) -> list[GenerateRequest]:
    """Prompts of 3 to 30 tokens; stop token 2 (EOS) and two more, so that lengths differ."""
    rng = np.random.default_rng(7)
    options = {"max_new_tokens": tokens, "stop_token_ids": (2, 11, 12), **sampling}
    return [
        GenerateRequest(
            request_id=f"r{i}",
            token_ids=rng.integers(4, VOCABULARY, rng.integers(3, 31)),
            sampling=SamplingParams(**{"seed": i, **options}),
            return_routes=routes,
        )
        for i in range(count)
    ]


def run(engine: EmbeddedEngine, asked: list[GenerateRequest]) -> dict[str, GenerateResult]:
    return {result.request_id: result for result in iterate(engine.generate(asked))}


@cache
def pretrained(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path)


def reference(path: Path, request: GenerateRequest, result: GenerateResult, temperature: float = 1.0):
    """Log-probabilities [response] and routes [tokens - 1, moe_layers, top_k] by one transformers forward."""
    network = pretrained(path)
    ids = torch.tensor(np.concatenate([request.token_ids, result.response_ids]))[None].long()
    n = len(request.token_ids)
    with torch.no_grad():
        out = network(
            input_ids=ids, **({"output_router_logits": True} if "moe" in network.config.model_type else {})
        )
    logprobs = (out.logits[0, n - 1 : -1] / temperature).log_softmax(-1).gather(1, ids[0, n:, None])[:, 0]
    routers = getattr(out, "router_logits", None) or ()
    routes = [logits[:-1].topk(network.config.num_experts_per_tok).indices for logits in routers]
    return logprobs.numpy(), torch.stack(routes, 1).numpy() if routes else None


def same(one: dict[str, GenerateResult], other: dict[str, GenerateResult]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[k].response_ids, other[k].response_ids)
        and one[k].logprobs.tobytes() == other[k].logprobs.tobytes()
        and one[k].finish_reason == other[k].finish_reason
        and (one[k].routes.checksum if one[k].routes else None)
        == (other[k].routes.checksum if other[k].routes else None)
        for k in one
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_logprobs_are_those_of_one_transformers_forward(
    name: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    asked = requests(12, temperature=temperature)
    results = run(started(path, slots=5), asked)
    assert len({len(r.response_ids) for r in results.values()}) > 3, "lengths should differ"
    for one in asked:
        expected, _ = reference(path, one, results[one.request_id], temperature)
        np.testing.assert_allclose(results[one.request_id].logprobs, expected, atol=1e-5)


def test_in_bfloat16_logprobs_are_near_those_in_float32(moe: Path) -> None:
    asked = requests(8)
    results = run(started(moe, slots=3, dtype=torch.bfloat16), asked)
    differences = [
        np.abs(results[one.request_id].logprobs - reference(moe, one, results[one.request_id])[0])
        for one in asked
    ]
    assert 0 < np.median(np.concatenate(differences)) < 0.1  # the logits of random weights are large


def test_routes_are_the_routers_choices_for_every_token_but_the_last(moe: Path) -> None:
    asked = requests(8, routes=True)
    results = run(started(moe, slots=3), asked)
    for one in asked:
        routes = results[one.request_id].routes
        assert routes is not None
        _, expected = reference(moe, one, results[one.request_id])
        assert routes.experts.dtype == np.uint8
        assert np.array_equal(np.sort(routes.experts, -1), np.sort(expected, -1))


def test_greedy_is_what_transformers_generates(dense: Path) -> None:
    network = pretrained(dense)
    asked = requests(6, temperature=0.0, stop_token_ids=(), tokens=16)
    for one, result in zip(asked, run(started(dense), asked).values(), strict=True):
        ids = torch.tensor(one.token_ids)[None]
        expected = network.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=None)[
            0, ids.shape[1] :
        ]
        assert result.response_ids.tolist() == expected.tolist()
        assert result.finish_reason == "length"
        np.testing.assert_allclose(result.logprobs, reference(dense, one, result)[0], atol=1e-5)


def test_the_same_requests_give_the_same_bits_whatever_was_generated_before(moe: Path) -> None:
    asked = requests(40, routes=True)
    engine = started(moe, slots=16)
    first = run(engine, asked)
    run(engine, [*requests(3, tokens=200, stop_token_ids=()), *requests(50)[3:]])
    assert same(run(engine, asked), first)
    assert same(run(started(moe, slots=16), asked), first)


def test_a_seeded_request_draws_alone_what_it_draws_in_a_crowd(moe: Path) -> None:
    asked = requests(40)
    crowd = run(started(moe, slots=13), asked)
    alone = started(moe)
    for one in asked[::7]:
        result = run(alone, [one])[one.request_id]
        assert result.response_ids.tolist() == crowd[one.request_id].response_ids.tolist()


def test_another_seed_draws_other_tokens_and_no_seed_never_repeats(moe: Path) -> None:
    prompt = requests(1)[0].token_ids

    def ask(name: str, seed: int | None) -> GenerateRequest:
        return GenerateRequest(name, prompt, SamplingParams(max_new_tokens=20, seed=seed))

    engine = started(moe, seed=5)
    results = run(engine, [ask("a", 1), ask("b", 2), ask("c", None), ask("d", None)])
    assert len({tuple(r.response_ids) for r in results.values()}) == 4
    again = run(started(moe, seed=5), [ask("a", 1), ask("b", 2), ask("c", None), ask("d", None)])
    assert same(results, again), "the engine's own stream starts from the engine's seed"


def test_results_come_in_order_of_completion_and_early_leavers_make_room(moe: Path) -> None:
    asked = [
        GenerateRequest(name, np.array([5, 6, 7]), SamplingParams(max_new_tokens=n, seed=0))
        for name, n in (("long", 60), ("short", 2), ("middle", 20), ("late", 3))
    ]
    order = [r.request_id for r in iterate(started(moe, slots=2).generate(asked))]
    assert order == ["short", "middle", "late", "long"]


def test_a_caller_that_leaves_early_frees_the_slots(moe: Path) -> None:
    engine = started(moe, slots=4)
    asked = requests(12)

    async def leave_after_one() -> None:
        stream = engine.generate(asked)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave_after_one())
    assert same(run(engine, asked), run(started(moe, slots=4), asked))


def test_concurrent_calls_share_the_batch_and_each_gets_its_own(moe: Path) -> None:
    engine = started(moe)
    asked = requests(9)

    async def collect(part: list[GenerateRequest]) -> dict[str, GenerateResult]:
        return {result.request_id: result async for result in engine.generate(part)}

    async def together() -> list[dict[str, GenerateResult]]:
        return await asyncio.gather(*(collect(asked[i::3]) for i in range(3)))

    parts = asyncio.run(together())
    assert [set(part) for part in parts] == [{r.request_id for r in asked[i::3]} for i in range(3)]
    whole = run(engine, [*asked[0::3], *asked[1::3], *asked[2::3]])
    assert same({k: v for part in parts for k, v in part.items()}, whole)


def test_new_weights_under_way_split_the_response_in_spans_each_by_its_own_weights(
    moe: Path, other_moe: Path
) -> None:
    engine = started(moe)
    asked = requests(6, tokens=30, stop_token_ids=(), routes=True)

    async def switch_midway() -> dict[str, GenerateResult]:
        results = {}

        async def collect() -> None:
            async for result in engine.generate(asked):
                results[result.request_id] = result

        task = asyncio.ensure_future(collect())
        for _ in range(12):
            await asyncio.sleep(0)
        engine.pause()
        engine.flush()
        engine.update_weights(load_file(other_moe / "model.safetensors").items(), 3)
        engine.resume()
        await task
        return results

    results = asyncio.run(switch_midway())
    for one in asked:
        result, n = results[one.request_id], len(one.token_ids)
        old, new = result.spans
        assert (old.version, new.version) == (0, 3)
        assert 0 < old.end == new.start < new.end == 30
        before, old_routes = reference(moe, one, result)
        after, new_routes = reference(other_moe, one, result)
        np.testing.assert_allclose(result.logprobs[: old.end], before[: old.end], atol=1e-5)
        np.testing.assert_allclose(result.logprobs[old.end :], after[old.end :], atol=1e-5)
        assert result.routes is not None
        assert result.routes.spans == result.spans
        cut = n + old.end - 1  # the row of the last old token chose the experts of the first new draw
        experts = np.sort(result.routes.experts, -1)
        assert np.array_equal(experts[:cut], np.sort(old_routes, -1)[:cut])
        assert np.array_equal(experts[cut:], np.sort(new_routes, -1)[cut:])


def test_flushing_under_way_changes_no_token(moe: Path) -> None:
    asked = requests(6)
    undisturbed = run(started(moe), asked)
    engine = started(moe)

    async def flush_often() -> dict[str, GenerateResult]:
        results = {}
        async for result in engine.generate(asked):
            engine.flush()
            results[result.request_id] = result
        return results

    flushed = asyncio.run(flush_often())
    for name, result in undisturbed.items():
        assert flushed[name].response_ids.tolist() == result.response_ids.tolist()
        assert flushed[name].spans == result.spans
        np.testing.assert_allclose(flushed[name].logprobs, result.logprobs, atol=1e-5)


def test_a_request_aborted_while_it_waits_has_an_empty_result(moe: Path) -> None:
    engine = started(moe, slots=2)
    asked = requests(5, tokens=20, stop_token_ids=())

    async def abort_some() -> dict[str, GenerateResult]:
        results = {}

        async def collect() -> None:
            async for result in engine.generate(asked):
                results[result.request_id] = result

        task = asyncio.ensure_future(collect())
        for _ in range(4):
            await asyncio.sleep(0)
        engine.pause()
        engine.abort(["r0", "r4"])  # one runs, one waits
        await asyncio.sleep(0.01)
        assert set(results) == {"r0", "r4"}, "delivered even while paused"
        engine.resume()
        await task
        return results

    results = asyncio.run(abort_some())
    assert 0 < len(results["r0"].response_ids) < 20
    assert len(results["r4"].response_ids) == 0
    assert results["r4"].spans == ()
    assert {results[k].finish_reason for k in ("r0", "r4")} == {"abort"}
    assert {results[k].finish_reason for k in ("r1", "r2", "r3")} == {"length"}


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_weights_are_named_as_the_files_on_disk_and_hold_their_values(
    name: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    files = load_file(path / "model.safetensors")
    assert started(path).fingerprint() == {k: digest(v) for k, v in files.items()}


def test_other_families_with_per_expert_names_work_too(tmp_path: Path) -> None:
    config = OlmoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config)
    randomize(network, 0)
    network.save_pretrained(tmp_path)
    engine = started(tmp_path)
    assert engine.fingerprint() == {
        k: digest(v) for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    asked = requests(4, routes=True)
    results = run(engine, asked)
    for one in asked:
        np.testing.assert_allclose(
            results[one.request_id].logprobs, reference(tmp_path, one, results[one.request_id])[0], atol=1e-5
        )


def test_a_model_from_a_configuration_equals_the_folder_once_its_weights_arrived(moe: Path) -> None:
    engine = EmbeddedEngine(AutoConfig.from_pretrained(moe))
    engine.start()
    assert "update_weights" in (engine.health() or "")
    with pytest.raises(EngineError, match="update_weights"):
        run(engine, requests(1))
    sent = engine.update_weights(load_file(moe / "model.safetensors").items(), 1)
    assert sent == engine.fingerprint()
    assert engine.health() is None
    asked = requests(8)
    assert same(run(engine, asked), run(started(moe), asked))


def unknown(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [*weights.items(), ("model.layers.0.mlp.experts.9.gate_proj.weight", torch.zeros(1))]


def missing(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [(k, v) for k, v in weights.items() if k != "model.layers.2.mlp.experts.3.down_proj.weight"]


def misshapen(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [
        (k, v.T if "layers.2.self_attn.q_norm" not in k and v.ndim == 2 else v) for k, v in weights.items()
    ]


def repeated(weights: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [*weights.items(), *list(weights.items())[:1]]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (unknown, r"experts\.9\.gate_proj.*Did you mean"),
        (missing, r"'model\.layers\.2\.mlp\.experts\.3\.down_proj\.weight' was not sent \(1 of "),
        (misshapen, r"lm_head.*sent \(64, 264\)"),
        (repeated, "twice"),
    ],
)
def test_a_broken_weight_stream_is_refused_by_name_and_changes_nothing(
    broken: object, message: str, moe: Path, other_moe: Path
) -> None:
    engine = started(moe)
    before = engine.fingerprint()
    with pytest.raises(UserError, match=message):
        engine.update_weights(iter(broken(load_file(other_moe / "model.safetensors"))), 1)  # type: ignore[operator]
    assert engine.fingerprint() == before
    assert engine.weight_version == 0


def test_weights_in_another_precision_are_cast_and_proved_as_held(moe: Path) -> None:
    engine = started(moe)
    half = {k: v.bfloat16() for k, v in load_file(moe / "model.safetensors").items()}
    assert engine.update_weights(half.items(), 1) == engine.fingerprint()
    assert engine.fingerprint() == {k: digest(v.float()) for k, v in half.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.arange(4, 250).repeat(3)[:500]}, "'bad'.*context of 512"),
        ({"token_ids": np.array([], dtype=np.int32)}, "'bad'.*empty"),
        ({"token_ids": np.array([VOCABULARY])}, "'bad'.*vocabulary"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "'bad'.*max_new_tokens"),
        ({"sampling": SamplingParams(max_new_tokens=5, top_p=0.0)}, "'bad'.*top_p"),
        ({"request_id": "r1"}, "'r1'.*under way"),
    ],
)
def test_a_request_that_cannot_be_met_is_named_before_anything_is_sampled(
    change: dict[str, object], message: str, moe: Path
) -> None:
    engine = started(moe)
    options = {"request_id": "bad", "token_ids": np.array([5]), "sampling": SamplingParams(max_new_tokens=20)}
    bad = GenerateRequest(**{**options, **change})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        run(engine, [*requests(3), bad])
    assert len(run(engine, requests(3))) == 3, "and the engine goes on"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        EmbeddedEngine(tmp_path).start()


def test_models_the_engine_would_get_wrong_are_refused() -> None:
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    window = Qwen3Config(**shape, num_attention_heads=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match="sliding_attention"):
        EmbeddedEngine(window).start()
