"""The prompt stream: one global order for any number of replicas, resumable anywhere, mixed by weight."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.stream import Pool, PromptStream
from megarl.errors import UserError
from megarl.records import Prompt


def pool(name: str, size: int, weight: float = 1.0) -> Pool:
    prompts = [Prompt(f"{name}/{i}", np.array([1]), f"{name} question {i}", "exact", {}) for i in range(size)]
    return Pool.of(name, prompts, weight)


def ids(prompts: list[Prompt]) -> list[str]:
    return [p.prompt_id for p in prompts]


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)


def stream_of(sizes: list[int], **settings) -> PromptStream:
    return PromptStream([pool(f"s{i}", n, 1 + i) for i, n in enumerate(sizes)], **settings)


@given(sizes, st.integers(1, 4), st.lists(st.integers(0, 5), max_size=8), st.integers(0, 3))
def test_replicas_share_out_exactly_what_one_replica_would_draw(sizes, replicas, counts, seed):
    alone = stream_of(sizes, seed=seed)
    together = [stream_of(sizes, seed=seed, replica=r, replicas=replicas) for r in range(replicas)]
    for count in counts:
        shares = [ids(s.next(count)) for s in together]
        assert [len(share) for share in shares] == [count] * replicas
        assert [i for share in shares for i in share] == ids(alone.next(count * replicas))
    states = [s.state_dict() for s in together]
    assert all(state == alone.state_dict() for state in states)


@given(sizes, st.data(), st.integers(1, 4))
def test_replicas_that_lack_unequally_many_draw_disjoint_prompts_and_none_is_lost(sizes, data, replicas):
    counts = st.lists(st.integers(0, 5), min_size=replicas, max_size=replicas)
    alone, expected = stream_of(sizes), []
    together = [stream_of(sizes, replica=r, replicas=replicas) for r in range(replicas)]
    for wanted in data.draw(st.lists(counts, max_size=6)):
        dealt = [s.deal(wanted) for s in together]
        assert [len(d.prompts) for d in dealt] == wanted
        expected += [(n, i) for d in dealt for n, i in enumerate(ids(d.prompts), d.first)]
        assert all(s.state_dict() == together[0].state_dict() for s in together)
    assert expected == list(enumerate(ids(alone.next(len(expected)))))
    assert together[0].drawn == len(expected)


@given(sizes, st.integers(0, 40), st.integers(0, 40))
def test_a_stream_goes_on_from_its_state_as_if_never_stopped(sizes, before, after):
    stream = stream_of(sizes)
    stream.next(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stream_of(sizes)
    resumed.load_state_dict(state)
    assert ids(resumed.next(after)) == ids(stream.next(after))
    assert resumed.state_dict() == stream.state_dict()


def test_a_run_resumes_on_another_number_of_replicas_without_losing_a_prompt():
    alone = stream_of([20])
    two = [stream_of([20], replica=r, replicas=2) for r in range(2)]
    seen = [i for s in two for i in ids(s.next(4))]
    five = [stream_of([20], replica=r, replicas=5) for r in range(5)]
    for s in five:
        s.load_state_dict(two[0].state_dict())
    seen += [i for s in five for i in ids(s.next(2))]
    assert seen == ids(alone.next(18))


def test_a_state_that_was_sorted_in_its_file_is_read_whatever_the_order_of_the_sources():
    def of_two() -> PromptStream:
        return PromptStream([pool("math", 7, 2.0), pool("code", 5)])

    straight, saved, resumed = of_two(), of_two(), of_two()
    saved.next(4)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict(), sort_keys=True)))
    assert ids(resumed.next(12)) == ids(straight.next(16))[4:]


@given(st.integers(1, 30), st.integers(0, 5))
def test_each_epoch_is_every_prompt_once_in_another_order(size, seed):
    stream = stream_of([size], seed=seed)
    epochs = [ids(stream.next(size)) for _ in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == size for e in epochs)
    if size > 8:
        assert epochs[0] != epochs[1]
    assert stream.state_dict()["sources"]["s0"]["epoch"] == 2


def test_without_shuffling_the_sources_own_order_is_kept():
    assert ids(stream_of([4], shuffle=False).next(6)) == ["s0/0", "s0/1", "s0/2", "s0/3", "s0/0", "s0/1"]


def test_another_seed_gives_another_order():
    assert ids(stream_of([30], seed=0).next(30)) != ids(stream_of([30], seed=1).next(30))


def test_the_shuffled_order_is_the_same_on_every_machine_and_version():
    assert ids(stream_of([8], seed=0).next(8)) == [f"s0/{i}" for i in (3, 1, 2, 6, 7, 4, 5, 0)]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=4), st.integers(1, 200))
def test_every_source_is_always_within_one_prompt_of_its_share(weights, count):
    stream = PromptStream([pool(f"s{i}", 5, w) for i, w in enumerate(weights)])
    drawn = [p.prompt_id.split("/")[0] for p in stream.next(count)]
    for i, weight in enumerate(weights):
        # Two sources are within one; with more, the lag stays under half their number.
        assert abs(drawn.count(f"s{i}") - count * weight / sum(weights)) < max(1.0, len(weights) / 2) + 1e-6


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: stream_of([4]), "source 's0' was 5 prompts .* and is 4 prompts"),
        (lambda: stream_of([5, 5]), "sources s0 then; s0, s1 now"),
        (lambda: stream_of([5], seed=1), "seed 0, shuffle True then; 1, True now"),
        (lambda: stream_of([5], shuffle=False), "shuffle True then"),
    ],
)
def test_a_resume_on_other_data_is_refused_and_says_what_changed(other, says):
    with pytest.raises(UserError, match=says):
        other().load_state_dict(stream_of([5]).state_dict())


def test_an_empty_source_is_refused():
    with pytest.raises(UserError, match="'s0' has no prompt"):
        stream_of([0])
    with pytest.raises(UserError, match="no source"):
        PromptStream([])
