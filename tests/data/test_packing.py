"""Packing: every sequence exactly once, within the budget, in the same place on each run; and the way
back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import (
    TokenSequence,
    make_micro_batches,
    micro_batch_count,
    pack,
    response_positions,
    scatter_response,
    split_to_count,
)
from megarl.records import Batch, Prompt, Sample, WeightSpan

lengths_lists = st.lists(st.integers(1, 60), max_size=40)
budgets = st.integers(1, 80)
shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12)


def make_samples(shapes: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """One sample for each (prompt tokens, response tokens), with random ids, mask and log-probabilities."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, (prompt_tokens, response_tokens) in enumerate(shapes):
        prompt = Prompt(f"t/{i}", rng.integers(1, 100, prompt_tokens), "", "exact", {})
        samples.append(
            Sample(
                prompt=prompt,
                sample_id=f"t/{i}#0",
                response_ids=rng.integers(1, 100, response_tokens),
                logprobs=-rng.random(response_tokens),
                loss_mask=rng.random(response_tokens) < 0.7,
                finish_reason="stop",
                spans=(WeightSpan(0, 0, response_tokens),),
            )
        )
    return samples


@given(lengths_lists, budgets)
def test_every_sequence_lies_in_exactly_one_micro_batch_in_order(lengths, budget):
    packed = pack(lengths, budget)
    assert sorted(i for b in packed for i in b) == list(range(len(lengths)))
    assert all(b == sorted(b) and b for b in packed)


@given(lengths_lists, budgets)
def test_only_a_lone_sequence_may_exceed_the_budget(lengths, budget):
    for b in pack(lengths, budget):
        assert sum(lengths[i] for i in b) <= budget or len(b) == 1


@given(lengths_lists, budgets)
def test_no_two_micro_batches_could_have_been_one(lengths, budget):
    loads = sorted(sum(lengths[i] for i in b) for b in pack(lengths, budget))
    assert all(a + b > budget for a, b in itertools.pairwise(loads))


def test_a_known_perfect_packing_is_found():
    lengths = [5, 3, 4, 6, 7, 2, 1, 8, 4]
    assert [sum(lengths[i] for i in b) for b in pack(lengths, 10)] == [10, 10, 10, 10]


@given(lengths_lists, budgets, st.integers(0, 10))
def test_a_larger_count_splits_micro_batches_and_drops_nothing(lengths, budget, extra):
    packed = pack(lengths, budget)
    split = split_to_count(packed, lengths, len(packed) + extra)
    assert sorted(i for b in split for i in b) == list(range(len(lengths)))
    assert len(split) == min(len(packed) + extra, len(lengths))
    heaviest = max((sum(lengths[i] for i in b) for b in packed), default=0)
    assert max((sum(lengths[i] for i in b) for b in split), default=0) <= heaviest


def test_splitting_balances_the_tokens():
    assert split_to_count([[0, 1, 2, 3]], [4, 4, 4, 4], 2) == [[0, 2], [1, 3]]
    assert split_to_count([[0, 1, 2]], [10, 5, 5], 2) == [[0], [1, 2]]


def test_too_small_a_count_is_refused():
    with pytest.raises(ValueError, match="3 micro-batches are needed"):
        make_micro_batches(make_samples([(5, 5)] * 3), 10, count=2)
    with pytest.raises(ValueError, match="must be positive"):
        pack([1], 0)


@given(shapes, st.integers(1, 40), st.integers(0, 4))
def test_micro_batches_hold_every_token_with_its_label_and_mask(shapes, budget, extra):
    samples = make_samples(shapes)
    count = micro_batch_count(samples, budget) + extra
    micro_batches = make_micro_batches(samples, budget, count)
    assert len(micro_batches) == count
    nothing = torch.zeros(len(samples))
    Batch(tuple(samples), nothing, nothing, nothing, micro_batches)  # validates the rows
    for mb in micro_batches:
        starts = mb.cu_seqlens.tolist()
        if not len(mb.rows):
            assert (mb.tokens, mb.token_ids.tolist(), mb.mask.any().item()) == (1, [0], False)
        for k, row in enumerate(mb.rows.tolist()):
            sample, here = samples[row], slice(starts[k], starts[k + 1])
            whole = [*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()]
            trained = [False] * len(sample.prompt.token_ids) + sample.loss_mask.tolist()
            assert mb.token_ids[here].tolist() == whole
            assert mb.position_ids[here].tolist() == list(range(len(whole)))
            assert mb.labels[here].tolist()[:-1] == whole[1:]
            assert mb.mask[here].tolist() == [*trained[1:], False]
        for name in ("token_ids", "position_ids", "labels"):
            assert getattr(mb, name).dtype == torch.int64
        assert (mb.mask.dtype, mb.cu_seqlens.dtype, mb.rows.dtype) == (torch.bool, torch.int32, torch.int64)


@given(shapes, st.integers(1, 40))
def test_micro_batches_come_fullest_first(shapes, budget):
    sizes = [mb.tokens for mb in make_micro_batches(make_samples(shapes), budget)]
    assert sizes == sorted(sizes, reverse=True)


@given(shapes, st.integers(1, 40))
def test_the_trained_tokens_are_the_active_tokens(shapes, budget):
    samples = make_samples(shapes)
    trained = sum(int(mb.mask.sum()) for mb in make_micro_batches(samples, budget))
    assert trained == sum(s.active_tokens for s in samples)


@given(shapes, st.integers(1, 40), st.integers(0, 3))
def test_a_scattered_value_is_found_where_its_token_is_predicted(shapes, budget, extra):
    samples = make_samples(shapes)
    back: dict[int, list[float]] = {}
    for mb in make_micro_batches(samples, budget, micro_batch_count(samples, budget) + extra):
        vector = scatter_response(mb, samples, [s.logprobs for s in samples])
        assert vector.shape == (mb.tokens,)
        assert vector.dtype == torch.float32
        rows = mb.rows.tolist()
        values = vector[response_positions(mb, samples)].split([len(samples[r].response_ids) for r in rows])
        back |= {row: value.tolist() for row, value in zip(rows, values, strict=True)}
    assert [back[i] for i in range(len(samples))] == [s.logprobs.tolist() for s in samples]


@given(shapes, st.integers(1, 40))
def test_a_response_token_sits_where_it_is_predicted(shapes, budget):
    samples = make_samples(shapes)
    for mb in make_micro_batches(samples, budget):
        positions = response_positions(mb, samples)
        responses = [samples[row].response_ids.tolist() for row in mb.rows.tolist()]
        assert mb.labels[positions].tolist() == [t for r in responses for t in r]
        scattered = scatter_response(mb, samples, [s.loss_mask for s in samples])
        assert torch.equal(scattered, mb.mask)


def test_a_vector_of_the_wrong_length_names_the_sample():
    samples = make_samples([(2, 3)])
    (mb,) = make_micro_batches(samples, 100)
    with pytest.raises(ValueError, match=r"'t/0#0'.*3 response tokens"):
        scatter_response(mb, samples, [np.zeros(4, dtype=np.float32)])


@settings(max_examples=30)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 20))
def test_demonstrations_pack_like_samples(masks, budget):
    sequences = [TokenSequence(np.arange(1, len(m) + 1), np.array(m)) for m in masks]
    micro_batches = make_micro_batches(sequences, budget)
    assert sorted(r for mb in micro_batches for r in mb.rows.tolist()) == list(range(len(masks)))
    assert sum(int(mb.mask.sum()) for mb in micro_batches) == sum(sum(m[1:]) for m in masks)


def test_a_malformed_token_sequence_is_refused():
    with pytest.raises(ValueError, match="non-empty"):
        TokenSequence(np.array([], dtype=np.int64), np.array([], dtype=bool))
    with pytest.raises(ValueError, match=r"loss_mask has shape \(1,\)"):
        TokenSequence(np.array([1, 2]), np.array([True]))


def test_ten_thousand_sequences_fill_the_budget():
    lengths = np.random.default_rng(0).integers(100, 8000, 10_000).tolist()
    packed = pack(lengths, 16384)
    assert sum(lengths) / (len(packed) * 16384) > 0.98  # the share of the budget that holds tokens
