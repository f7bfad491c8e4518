"""Drawing tokens: right frequencies, right filters, one uniform number for each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.embedded.draw import Filters, draw, keep, uniforms

P = torch.tensor([0.05, 0.4, 0.0, 0.2, 0.1, 0.25])


def filters(top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0, rows: int = 1) -> Filters:
    return Filters(torch.full((rows,), top_p), torch.full((rows,), top_k), torch.full((rows,), min_p))


def draws(count: int, temperature: float, chosen: Filters | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    uniform = torch.from_numpy(uniforms(3, count))
    return draw(P.log().expand(count, -1), torch.full((count,), temperature), uniform, chosen)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    count = 40_000
    tokens, logprobs = draws(count, temperature)
    expected = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
    share = torch.bincount(tokens, minlength=len(P)) / count
    assert (share - expected).abs().max() < 4 * 0.5 / count**0.5
    assert share[2] == 0, "never a token of probability 0"
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_temperature_0_takes_the_most_probable_with_its_plain_logprob() -> None:
    tokens, logprobs = draws(10, 0.0)
    assert tokens.tolist() == [1] * 10
    torch.testing.assert_close(logprobs, P[1].log().expand(10))


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 5, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 5}),
        ({"top_p": 0.99}, {1, 5, 3, 4, 0}),
        ({"min_p": 0.5}, {1, 5, 3}),
        ({"top_k": 4, "top_p": 0.7, "min_p": 0.6}, {1, 5}),
        ({"top_p": 1e-9}, {1}),
    ],
)
def test_filters_keep_these_tokens_and_the_logprobs_of_the_whole_distribution(
    chosen: dict[str, float], kept: set[int]
) -> None:
    count = 2_000
    tokens, logprobs = draws(count, 1.0, filters(rows=count, **chosen))  # type: ignore[arg-type]
    assert set(tokens.tolist()) == kept
    torch.testing.assert_close(logprobs, P.log()[tokens])


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=30),
    st.floats(0.01, 1),
    st.integers(-1, 30),
    st.floats(0, 1),
)
def test_what_is_kept_are_the_most_probable_and_never_nothing(
    logits: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    p = torch.tensor(logits).softmax(-1)
    kept = keep(p[None], filters(top_p, top_k, min_p))[0]
    assert kept.max() == p.max()
    assert ((kept == 0) | (kept == p)).all()
    assert all(p[kept == 0] <= p[kept > 0].min())
    if top_k > 0:
        assert (kept > 0).sum() <= top_k


@given(st.integers(0, 2**53 - 1))
def test_any_uniform_number_picks_a_token_that_may_be_drawn(bits: int) -> None:
    uniform = torch.tensor([bits / 2**53], dtype=torch.float64)
    tokens, _ = draw(P.log()[None], torch.ones(1), uniform, filters(top_k=4))
    assert tokens.item() in {1, 5, 3, 4}


def test_a_seed_fixes_the_numbers_and_a_longer_response_extends_them() -> None:
    assert np.array_equal(uniforms(5, 100)[:10], uniforms(5, 10))
    assert not np.array_equal(uniforms(5, 10), uniforms(6, 10))
    assert uniforms(-1, 3).shape == uniforms(2**70, 3).shape == (3,)
