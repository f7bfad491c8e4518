"""Log-probabilities and entropies in chunks beside the plain computation that holds all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.bench.measure import PeakMemory, in_turns
from megarl.megatron.logprobs import VocabularyShard, vocabulary_logprobs


def plain_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What one would write first: all logits, a float32 softmax, autograd."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def bench_logprobs(
    *, tokens: int, hidden_size: int, vocabulary: int, chunk: int, dtype: torch.dtype, turns: int
) -> str:
    """Time of forward and backward, and memory beyond inputs, of both; a table for people."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, dtype=dtype, device=device) * 0.05).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    shard = VocabularyShard(0, vocabulary, None)

    def plain() -> None:
        _backward(plain_logprobs(hidden, weight, labels))

    def chunked() -> None:
        _backward(vocabulary_logprobs(hidden, weight, labels, shard, chunk=chunk))

    def _backward(values: tuple[Tensor, Tensor]) -> None:
        hidden.grad = weight.grad = None
        (values[0].sum() - 0.1 * values[1].sum()).backward()

    variants = {"plain": plain, "chunked": chunked}
    peaks = {}
    for name, work in variants.items():
        with PeakMemory() as memory:
            work()
        peaks[name] = memory.peak
    lines = [
        f"{tokens} tokens, hidden {hidden_size}, vocabulary {vocabulary}, chunks of {chunk}, {dtype}, {device}, "
        f"{torch.get_num_threads()} thread(s); one chunk of float32 logits is {chunk * vocabulary * 4 / 2**20:.0f} MiB"
    ]
    for name, timing in in_turns(variants, turns=turns).items():
        lines.append(f"{name:<10} {timing}   peak {peaks[name] / 2**20:8.1f} MiB")
    return "\n".join(lines)
