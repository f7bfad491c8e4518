"""The LM head's log-probabilities and entropies in chunks beside the plain computation that holds all logits: time and
memory.

    python benchmarks/logprobs.py [--tokens 2048] [--hidden-size 512] [--vocabulary 32768] [--chunk 512]
                                  [--dtype float32|bfloat16] [--turns 5]
"""

from __future__ import annotations

import argparse

import torch
from measure import PeakMemory, in_turns
from torch import Tensor

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the micro-batch")
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=32768, help="rows of the LM head")
    parser.add_argument("--chunk", type=int, default=512, help="tokens whose logits exist at one time")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--turns", type=int, default=5, help="times that each variant is measured, at least 2"
    )
    options = vars(parser.parse_args())
    print(bench_logprobs(**{**options, "dtype": getattr(torch, options["dtype"])}))


if __name__ == "__main__":
    main()
