"""Traces are checked before they are believed, stale rows are told apart, and packing loses nothing."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import make_micro_batches
from megarl.records import Prompt, RouteTrace, Sample, WeightSpan
from megarl.routing.store import RouteStore
from megarl.routing.trace import LIVE, RouteShape, RoutingError, check_trace, stale_rows

SHAPE = RouteShape(moe_layers=(1, 2, 5), experts=8, top_k=2)


def sample(
    prompt: int = 3,
    response: int = 4,
    *,
    name: str = "p/0#1",
    spans: tuple[WeightSpan, ...] | None = None,
    made: tuple[WeightSpan, ...] | None = None,
    seed: int = 0,
) -> Sample:
    """A response with a random but proper trace. made: versions that made the routes, by default those of the
    tokens."""
    rng = np.random.default_rng(seed)
    rows = prompt + response - 1
    experts = rng.random((rows, len(SHAPE.moe_layers), SHAPE.experts)).argsort(-1)[..., : SHAPE.top_k]
    experts = experts.astype(np.uint8)
    spans = spans or (WeightSpan(3, 0, response),)
    return Sample(
        Prompt(name.split("#")[0], np.arange(prompt), "", "exact", {}),
        name,
        np.arange(response),
        np.zeros(response),
        np.ones(response, bool),
        "stop",
        spans,
        RouteTrace(experts, made or spans, zlib.crc32(experts.tobytes())),
    )


def with_experts(original: Sample, experts: np.ndarray) -> Sample:
    assert original.routes is not None
    return replace(original, routes=RouteTrace(experts, original.routes.spans, zlib.crc32(experts.tobytes())))


def test_a_proper_trace_passes_in_the_smallest_type() -> None:
    assert check_trace(sample(), SHAPE).experts.dtype == SHAPE.dtype == np.uint8
    assert RouteShape((0,), 256, 8).dtype == np.uint8
    assert RouteShape((0,), 257, 8).dtype == np.uint16


def test_the_size_of_a_large_models_trace_is_what_it_should_be() -> None:
    """128 experts, top-8, 48 MoE layers: 384 bytes a token."""
    shape = RouteShape(tuple(range(48)), 128, 8)
    store = RouteStore()
    store.add("s", np.zeros((99, 48, 8), shape.dtype), np.zeros(99, bool))
    assert store.bytes / store.tokens == 384


def test_what_cannot_be_replayed_is_named() -> None:
    good = sample()
    assert good.routes is not None
    experts = good.routes.experts
    outside, twice = experts.copy(), experts.copy()
    outside[2, 1, 0] = 8
    twice[4, 2] = 5
    broken = [
        (replace(good, routes=None), "no routes"),
        (with_experts(good, experts[:, :2]), r"shape \[6, 2, 2\], expected \[6, 3, 2\]"),
        (with_experts(good, experts[..., :1]), r"shape \[6, 3, 1\]"),
        (with_experts(good, outside), "layer 2: expert 8 at token 2"),
        (with_experts(good, twice), "layer 5: the same expert twice for token 4"),
        (replace(good, routes=replace(good.routes, checksum=1)), "corrupted"),
        (sample(made=(WeightSpan(7, 0, 4),)), r"weight version 7, the tokens of \[3\]"),
    ]
    for wrong, told in broken:
        with pytest.raises(RoutingError, match=told) as refusal:
            check_trace(wrong, SHAPE)
        assert "'p/0#1'" in str(refusal.value)


def test_rows_made_by_other_weights_than_the_tokens_are_stale() -> None:
    """Tokens 0 and 1 by version 3, the others by 4; after the update all were run through version 4 again."""
    spans = (WeightSpan(3, 0, 2), WeightSpan(4, 2, 4))
    retracted = sample(spans=spans, made=(WeightSpan(4, 0, 4),))
    assert retracted.routes is not None
    # rows 0 to 2 are the prompt's, of which the last leads to response token 0
    assert stale_rows(retracted, retracted.routes).tolist() == [True, True, True, True, False, False]
    kept = sample(spans=spans)
    assert kept.routes is not None
    assert not stale_rows(kept, kept.routes).any()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 9))
def test_packed_routes_come_back_and_what_has_none_is_live(shapes: list[tuple[int, int]], extra: int) -> None:
    samples = [sample(p, r, name=f"p/{n}#0", seed=n) for n, (p, r) in enumerate(shapes)]
    store = RouteStore()
    for s in samples:
        trace = check_trace(s, SHAPE) if len(s.response_ids) else s.routes
        assert trace is not None
        store.add(s.sample_id, trace.experts, stale_rows(s, trace))
    micro_batches = make_micro_batches(samples, 12, 6 + extra)
    seen = set()
    for micro_batch in micro_batches:
        packed = store.packed([samples[row].sample_id for row in micro_batch.rows.tolist()], (3, 2))
        assert packed.shape == (micro_batch.tokens, 3, 2)
        if not len(micro_batch.rows):
            assert (packed == LIVE).all()
        bounds = micro_batch.cu_seqlens.tolist()
        for n, row in enumerate(micro_batch.rows.tolist()):
            routes = packed[bounds[n] : bounds[n + 1]]
            expected = samples[row].routes
            assert expected is not None
            assert np.array_equal(routes[:-1].numpy(), expected.experts)
            assert (routes[-1] == LIVE).all()
            seen.add(row)
    assert seen == set(range(len(samples)))


def test_beyond_its_memory_the_store_uses_a_file_and_frees_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    samples = [sample(5, 6, name=f"p/{n}#0", seed=n) for n in range(4)]
    inside, outside = RouteStore(), RouteStore(in_memory_bytes=70, folder=tmp_path)
    for s in samples:
        assert s.routes is not None
        for store in (inside, outside):
            store.add(s.sample_id, s.routes.experts, np.zeros(10, bool))
    (micro_batch,) = make_micro_batches(samples, 100)
    names = [samples[row].sample_id for row in micro_batch.rows.tolist()]
    expected = inside.packed(names, (3, 2))
    assert torch.equal(outside.packed(names, (3, 2)), expected)
    assert any(isinstance(experts, np.memmap) for experts, _ in outside._kept.values())
    outside.close()
    assert not outside._kept
    assert not list(tmp_path.iterdir())
