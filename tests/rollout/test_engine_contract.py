"""What every engine promises (`megarl.rollout.engine.Engine`), held against transformers on the same
weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from megarl.errors import UserError
from megarl.records import Prompt, Sample
from megarl.rollout.engine import Engine, GenerateRequest, GenerateResult, SamplingParams, iterate
from megarl.rollout.sglang.engine import SGLangEngine
from tests.models import SHAPE, VOCABULARY
from tests.rollout.engines import leaders_of
from tests.rollout.reference import Reference, checkpoint_weights

CLOSE = 1e-4  # log-probabilities of float32 weights, summed in another order


def make_request(
    name: str, prompt_tokens: int, *, seed: int = 0, routes: bool = False, **sampling: object
) -> GenerateRequest:
    """A random prompt. Without stop tokens, so that only the length ends it."""
    ids = np.random.default_rng([seed, prompt_tokens]).integers(4, VOCABULARY, prompt_tokens)
    options: dict[str, object] = {"max_new_tokens": 24, "seed": seed, **sampling}
    return GenerateRequest(name, ids.astype(np.int32), SamplingParams(**options), routes)  # type: ignore[arg-type]


def generate(engine: Engine, *requests: GenerateRequest) -> dict[str, GenerateResult]:
    """All results by request id, in order of completion."""
    return {result.request_id: result for result in iterate(engine.generate(requests))}


def as_sample(request: GenerateRequest, result: GenerateResult) -> Sample:
    """The record it becomes, whose own checks (shapes, contiguous spans, route rows) then hold."""
    return Sample(
        prompt=Prompt("test/0", request.token_ids, "", "none", {}),
        sample_id=result.request_id,
        response_ids=result.response_ids,
        logprobs=result.logprobs,
        loss_mask=np.ones(len(result.response_ids), dtype=bool),
        finish_reason=result.finish_reason,
        spans=result.spans,
        routes=result.routes,
    )


def processes_below_us() -> set[int]:
    children = psutil.Process(os.getpid()).children(recursive=True)
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE}


def processes_of(engine: Engine) -> set[int]:
    """The process groups of the servers that it manages; an engine without servers has none."""
    leaders = leaders_of(engine) if isinstance(engine, SGLangEngine) else []
    return {pid for pid in processes_below_us() if os.getpgid(pid) in leaders}


@contextlib.contextmanager
def updating(engine: Engine) -> Iterator[None]:
    """Paused, and resumed whatever happens."""
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    engine: Engine, reference: Reference, temperature: float
) -> None:
    requests = [make_request(f"r{n}", n, seed=n, temperature=temperature) for n in (1, 5, 17, 64, 40)]
    # One prompt that begins as another does, for engines that keep keys and values of prefixes.
    longer = np.concatenate([requests[3].token_ids, requests[1].token_ids])
    requests.append(GenerateRequest("longer", longer, requests[0].sampling))
    results = generate(engine, *requests)
    for request in requests:
        result = results[request.request_id]
        as_sample(request, result)
        np.testing.assert_allclose(result.logprobs, reference.logprobs(request, result), atol=CLOSE)
        if temperature == 0.0:
            np.testing.assert_array_equal(result.response_ids, reference.greedy(request, result))


def test_routes_are_the_routers_choices_for_every_token_but_the_last(
    engine: Engine, reference: Reference
) -> None:
    requests = [make_request(f"r{n}", n, seed=n, routes=True) for n in (1, 9, 33)]
    requests.append(make_request("again", 33, seed=33, routes=True, max_new_tokens=5))
    requests.append(make_request("without", 9))
    results = generate(engine, *requests)
    assert results.pop("without").routes is None
    for request in requests[:-1]:
        result = results[request.request_id]
        as_sample(request, result)
        assert result.routes is not None
        assert result.routes.experts.dtype == np.uint8
        assert result.routes.checksum == zlib.crc32(result.routes.experts.tobytes())
        assert result.routes.spans == result.spans
        np.testing.assert_array_equal(np.sort(result.routes.experts, -1), reference.routes(request, result))


def test_a_stop_token_ends_the_response_and_is_its_last_token(engine: Engine) -> None:
    free = generate(engine, make_request("free", 11, temperature=0.0))["free"]
    stop = int(free.response_ids[7])
    length = free.response_ids.tolist().index(stop) + 1
    request = make_request("stopped", 11, temperature=0.0, stop_token_ids=(stop,))
    stopped = generate(engine, request)["stopped"]
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids.tolist() == free.response_ids[:length].tolist()
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[:length], atol=CLOSE)


def test_without_a_stop_token_the_response_has_exactly_max_new_tokens(engine: Engine) -> None:
    requests = [make_request(f"r{n}", 6, seed=n, max_new_tokens=n) for n in (1, 2, 31)]
    results = generate(engine, *requests)
    assert {name: len(result.response_ids) for name, result in results.items()} == {
        "r1": 1,
        "r2": 2,
        "r31": 31,
    }
    assert {result.finish_reason for result in results.values()} == {"length"}


def test_prompt_and_response_may_fill_the_context_to_the_last_token(engine: Engine) -> None:
    context = SHAPE["max_position_embeddings"]
    request = make_request("full", context - 1, max_new_tokens=1)
    assert len(generate(engine, request)["full"].response_ids) == 1


def test_results_come_in_order_of_completion(engine: Engine) -> None:
    lengths = {"long": 120, "short": 3, "middle": 45}
    requests = [make_request(name, 8, seed=n, max_new_tokens=n) for name, n in lengths.items()]
    assert list(generate(engine, *requests)) == ["short", "middle", "long"]


def test_an_aborted_request_returns_what_it_has_and_others_go_on(
    engine: Engine, reference: Reference
) -> None:
    doomed = make_request("doomed", 8, max_new_tokens=480, routes=True)
    also = make_request("also doomed", 9, max_new_tokens=480)
    requests = [
        doomed,
        also,
        make_request("signal", 5, max_new_tokens=20),
        make_request("on", 7, max_new_tokens=60),
    ]
    results = {}
    for result in iterate(engine.generate(requests)):
        results[result.request_id] = result
        if result.request_id == "signal":
            engine.abort(["doomed", "also doomed"])
    assert results.keys() == {"doomed", "also doomed", "signal", "on"}
    assert len(results["on"].response_ids) == 60
    for request in (doomed, also):
        result = results[request.request_id]
        as_sample(request, result)
        assert result.finish_reason == "abort"
        assert 0 < len(result.response_ids) < 480
        np.testing.assert_allclose(result.logprobs, reference.logprobs(request, result), atol=CLOSE)
    partial = results["doomed"]
    assert partial.routes is not None
    np.testing.assert_array_equal(np.sort(partial.routes.experts, -1), reference.routes(doomed, partial))


def test_abort_without_names_ends_everything(engine: Engine) -> None:
    requests = [make_request(f"r{n}", 4, seed=n, max_new_tokens=480) for n in range(40)]
    requests.append(make_request("signal", 4, max_new_tokens=2))
    finished = []
    for result in iterate(engine.generate(requests[::-1])):
        finished.append(result.finish_reason)
        if result.request_id == "signal":
            engine.abort()
    assert len(finished) == 41
    # A server may take up requests in another order than they were sent: its first ones may be done by then.
    assert finished.count("abort") >= 24
    assert set(finished[-24:]) == {"abort"}


def test_a_caller_who_leaves_early_leaves_the_engine_free(engine: Engine) -> None:
    async def take_one() -> None:
        requests = [make_request(f"r{n}", 4, max_new_tokens=5 + 200 * n) for n in range(3)]
        async with contextlib.aclosing(engine.generate(requests)) as results:  # type: ignore[type-var]
            async for _ in results:
                break

    asyncio.run(take_one())
    assert len(generate(engine, make_request("r1", 4, max_new_tokens=6))["r1"].response_ids) == 6


def test_weights_that_change_under_way_split_the_response_in_spans_each_by_its_own_weights(
    engine: Engine, reference: Reference, newer_reference: Reference, newer_policy: Path
) -> None:
    old, new = engine.weight_version, engine.weight_version + 1
    request = make_request("long", 13, max_new_tokens=200, routes=True)
    results = {}
    for result in iterate(engine.generate([request, make_request("signal", 5, max_new_tokens=20)])):
        results[result.request_id] = result
        if result.request_id == "signal":
            with updating(engine):
                engine.flush()
                engine.update_weights(checkpoint_weights(newer_policy).items(), new)
    result = results["long"]
    as_sample(request, result)
    assert [span.version for span in result.spans] == [old, new]
    change = result.spans[1].start
    assert 0 < change < 200
    before, after = reference.logprobs(request, result), newer_reference.logprobs(request, result)
    np.testing.assert_allclose(result.logprobs[:change], before[:change], atol=CLOSE)
    np.testing.assert_allclose(result.logprobs[change:], after[change:], atol=CLOSE)
    # A route row belongs to the version that the trace says, whichever way the engine goes on.
    assert result.routes is not None
    by_version = {old: reference.routes(request, result), new: newer_reference.routes(request, result)}
    rows = np.sort(result.routes.experts, -1)
    for span in result.routes.spans:
        first = span.start + len(request.token_ids) - 1 if span.start else 0
        last = span.end + len(request.token_ids) - 1
        np.testing.assert_array_equal(rows[first:last], by_version[span.version][first:last])


def test_after_an_update_everything_is_sampled_by_the_new_weights(
    engine: Engine, newer_reference: Reference, newer_policy: Path
) -> None:
    # The prompt is cached with the old weights first.
    request = make_request("r", 50, routes=True)
    generate(engine, request)
    version = engine.weight_version + 3
    with updating(engine):
        engine.flush()
        engine.update_weights(checkpoint_weights(newer_policy).items(), version)
    assert engine.weight_version == version
    result = generate(engine, request)["r"]
    assert [span.version for span in result.spans] == [version]
    np.testing.assert_allclose(result.logprobs, newer_reference.logprobs(request, result), atol=CLOSE)
    assert result.routes is not None
    np.testing.assert_array_equal(np.sort(result.routes.experts, -1), newer_reference.routes(request, result))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.mlp.experts.5.up_proj.weight",
        "model.layers.2.mlp.experts.7.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "lm_head.weight",
    ],
)
def test_a_sync_is_proved_by_equal_digests_and_one_flipped_bit_is_noticed(
    engine: Engine, policy: Path, name: str
) -> None:
    weights = checkpoint_weights(policy)
    intended = engine.update_weights(weights.items(), engine.weight_version + 1)
    assert engine.fingerprint() == intended
    flipped = weights[name].clone()
    flipped.view(torch.int32).view(-1)[-1] ^= 1
    # As if the engine had received something else than was meant: one bit of one element.
    received = engine.update_weights({**weights, name: flipped}.items(), engine.weight_version + 1)
    held = engine.fingerprint()
    assert held == received
    assert held.keys() == intended.keys()
    assert len([key for key in held if held[key] != intended[key]]) == 1


def test_a_request_longer_than_the_context_is_named_before_anything_is_sampled(engine: Engine) -> None:
    context = SHAPE["max_position_embeddings"]
    fine = make_request("fine", 4, max_new_tokens=3)
    for prompt, new in ((context + 100, 4), (context, 1), (context - 2, 3)):
        with pytest.raises(UserError, match=r"'too long'.*512"):
            generate(engine, fine, make_request("too long", prompt, max_new_tokens=new))
    assert len(generate(engine, fine)["fine"].response_ids) == 3


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (GenerateRequest("bad", np.zeros(0, dtype=np.int32), SamplingParams(4)), "empty"),
        (GenerateRequest("bad", np.array([5, VOCABULARY], dtype=np.int32), SamplingParams(4)), "vocabulary"),
        (GenerateRequest("bad", np.array([5], dtype=np.int32), SamplingParams(0)), "max_new_tokens"),
    ],
)
def test_a_request_that_makes_no_sense_is_named(
    engine: Engine, request_: GenerateRequest, complaint: str
) -> None:
    with pytest.raises(UserError, match=f"'bad'.*{complaint}"):
        generate(engine, request_)


def test_two_requests_of_one_name_are_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="'twin'"):
        generate(engine, make_request("twin", 4), make_request("twin", 5))


def test_pausing_keeps_requests_and_resuming_twice_is_safe(engine: Engine, reference: Reference) -> None:
    request = make_request("kept", 6, max_new_tokens=90)
    results = {}
    for result in iterate(engine.generate([request, make_request("signal", 5, max_new_tokens=10)])):
        results[result.request_id] = result
        if result.request_id == "signal":
            engine.pause()
            assert engine.health() is None
            engine.resume()
            engine.resume()
    kept = results["kept"]
    assert kept.finish_reason == "length"
    assert len(kept.response_ids) == 90
    np.testing.assert_allclose(kept.logprobs, reference.logprobs(request, kept), atol=CLOSE)


def test_closing_leaves_no_process_and_may_be_repeated(engine: Engine) -> None:
    """Last, for it costs a start of the engine to whoever comes after it."""
    assert engine.health() is None
    others = processes_below_us() - processes_of(engine)
    engine.close()
    engine.close()
    assert engine.health() is not None
    assert processes_below_us() <= others
