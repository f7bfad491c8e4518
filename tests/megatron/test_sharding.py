"""Padding and splitting lose nothing and follow Transformer Engine's load-balanced order."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.megatron.sharding import SequenceSharding, shard_layout

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def sharding_of(lengths: list[int], context: int, tensor: int) -> SequenceSharding:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return shard_layout(bounds, context=context, tensor=tensor)


@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_every_token_lies_on_exactly_one_rank_and_comes_back(
    lengths: list[int], context: int, tensor: int
) -> None:
    sharding = sharding_of(lengths, context, tensor)
    values = torch.arange(1, sum(lengths) + 1)
    parts = [sharding.take(values, sharding.local(rank)) for rank in range(context)]
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % tensor == 0
    assert sorted(v for part in parts for v in part.tolist() if v) == values.tolist()
    assert torch.equal(torch.cat(parts)[sharding.restore], values)
    for rank in range(context):
        shards = [sharding.shard(rank, n) for n in range(tensor)]
        assert torch.equal(torch.cat(shards), sharding.local(rank))


@given(LENGTHS, st.sampled_from([2, 4]))
def test_each_sequence_is_cut_into_chunks_that_balance_causal_attention(
    lengths: list[int], context: int
) -> None:
    sharding = sharding_of(lengths, context, 1)
    bounds = sharding.cu_seqlens.tolist()
    for rank in range(context):
        expected = []
        for start, end in itertools.pairwise(bounds):
            chunk = (end - start) // (2 * context)
            assert (end - start) == chunk * 2 * context
            for number in (rank, 2 * context - 1 - rank):
                expected += range(start + number * chunk, start + (number + 1) * chunk)
        assert sharding.local(rank).tolist() == expected


def test_without_parallelism_nothing_moves() -> None:
    sharding = sharding_of([3, 5, 1], 1, 1)
    assert sharding.cu_seqlens.tolist() == [0, 3, 8, 9]
    assert sharding.source.tolist() == list(range(9))
    assert sharding.restore.tolist() == list(range(9))


def test_a_size_can_be_asked_for() -> None:
    sharding = shard_layout(torch.tensor([0, 3, 7]).int(), context=2, tensor=2, at_least=17)
    assert len(sharding.source) == 20
    assert (sharding.source >= 0).sum() == 7


def test_padding_takes_the_value_asked_for() -> None:
    sharding = sharding_of([3], 2, 1)
    mask = sharding.take(torch.ones(3, dtype=torch.bool), sharding.local(0), False)
    assert sharding.local(0).tolist() == [0, 3]
    assert mask.tolist() == [True, False]
