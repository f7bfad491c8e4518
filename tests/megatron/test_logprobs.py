"""Log-probabilities and entropies in chunks, against the plain computation in float64; and what they cost in memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measure import PeakMemory
from megarl.megatron.logprobs import VocabularyShard, vocabulary_logprobs
from tests.ranks import RankPool

TOKENS, HIDDEN, VOCABULARY, PADDED = 37, 16, 101, 104


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator) * 3
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    ups = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, labels, ups[0], ups[1]


def plain(temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies and the gradients of hidden and weight, float64, with all logits at once."""
    hidden, weight, labels, up, down = (
        x.double().requires_grad_() if x.is_floating_point() else x for x in problem()
    )
    logits = (hidden @ weight[:VOCABULARY].T) / temperature
    log_p = logits.log_softmax(-1)
    logprobs, entropies = log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    ((logprobs * up).sum() + (entropies * down).sum()).backward()
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
def test_chunks_give_the_plain_numbers_and_padding_rows_take_no_part(temperature: float, chunk: int) -> None:
    hidden, weight, labels, up, down = problem()
    hidden.requires_grad_()
    weight.requires_grad_()
    shard = VocabularyShard(0, VOCABULARY, None)
    got = vocabulary_logprobs(hidden, weight, labels, shard, temperature=temperature, chunk=chunk)
    ((got[0] * up).sum() + (got[1] * down).sum()).backward()
    for value, expected in zip((*got, hidden.grad, weight.grad), plain(temperature), strict=True):
        torch.testing.assert_close(value.double(), expected, atol=2e-5, rtol=2e-5)
    assert not weight.grad[VOCABULARY:].any()


def test_entropies_alone_or_log_probabilities_alone_may_be_learned() -> None:
    for chosen in (0, 1):
        hidden, weight, labels, up, _ = problem()
        hidden.requires_grad_()
        shard = VocabularyShard(0, VOCABULARY, None)
        (vocabulary_logprobs(hidden, weight, labels, shard)[chosen] * up).sum().backward()
        reference = problem()[0].double().requires_grad_()
        log_p = (reference @ weight[:VOCABULARY].double().T).log_softmax(-1)
        values = (log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1))
        (values[chosen] * up).sum().backward()
        torch.testing.assert_close(hidden.grad.double(), reference.grad, atol=2e-5, rtol=2e-5)


def test_no_token_is_no_trouble() -> None:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(PADDED, HIDDEN, requires_grad=True)
    logprobs, entropies = vocabulary_logprobs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), VocabularyShard(0, VOCABULARY, None)
    )
    (logprobs.sum() + entropies.sum()).backward()
    assert not weight.grad.any()


def test_logits_far_apart_stay_finite() -> None:
    hidden, weight, labels, *_ = problem()
    hidden = (hidden * 1e4).requires_grad_()
    logprobs, entropies = vocabulary_logprobs(hidden, weight, labels, VocabularyShard(0, VOCABULARY, None))
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.isfinite().all()
    assert (entropies >= 0).all()
    assert hidden.grad.isfinite().all()


def test_float32_head_on_bfloat16_weights() -> None:
    hidden, weight, labels, *_ = problem()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    shard = VocabularyShard(0, VOCABULARY, None)
    expected = vocabulary_logprobs(hidden.float(), weight.float(), labels, shard)[0]
    exact = vocabulary_logprobs(hidden, weight, labels, shard, float32=True)[0]
    rounded = vocabulary_logprobs(hidden, weight, labels, shard)[0]
    torch.testing.assert_close(exact, expected)
    assert (rounded - expected).abs().max() > 1e-3


def sharded_job() -> list[torch.Tensor]:
    """On two tensor-parallel ranks, the second holding the padding: values, and this rank's gradients."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), PADDED // 2
    hidden, weight, labels, up, down = problem()
    hidden.requires_grad_()
    weight = weight[rank * rows :][:rows].clone().requires_grad_()
    shard = VocabularyShard(rank * rows, min(rows, VOCABULARY - rank * rows), dist.group.WORLD)
    logprobs, entropies = vocabulary_logprobs(hidden, weight, labels, shard, temperature=0.7, chunk=8)
    ((logprobs * up).sum() + (entropies * down).sum()).backward()
    dist.destroy_process_group()
    return [x.detach() for x in (logprobs, entropies, hidden.grad, weight.grad)]


@pytest.mark.distributed
def test_a_split_vocabulary_gives_the_plain_numbers(ranks: RankPool) -> None:
    first, second = ranks.run(2, sharded_job)
    logprobs, entropies, grad_hidden, grad_weight = plain(0.7)
    for part in (first, second):
        torch.testing.assert_close(part[0].double(), logprobs, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(part[1].double(), entropies, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close((first[2] + second[2]).double(), grad_hidden, atol=2e-5, rtol=2e-5)
    whole = torch.cat([first[3], second[3]]).double()
    torch.testing.assert_close(whole, grad_weight, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extra_memory_is_one_chunk_of_logits(dtype: torch.dtype) -> None:
    """Beyond what comes out (two numbers a token, the two gradients), forward and backward hold less than 1.3 times
    the float32 logits of one chunk."""
    tokens, hidden_size, vocabulary, chunk = 512, 8, 4096, 128
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    with PeakMemory() as memory:
        logprobs, entropies = vocabulary_logprobs(
            hidden, weight, labels, VocabularyShard(0, vocabulary, None), chunk=chunk
        )
        (logprobs.sum() - entropies.sum()).backward()
    results = (hidden.numel() + weight.numel()) * (dtype.itemsize + 4) + 8 * 4 * tokens
    assert memory.peak - results < 1.3 * chunk * vocabulary * 4
    assert memory.peak > 0.5 * chunk * vocabulary * dtype.itemsize  # it does see the logits
