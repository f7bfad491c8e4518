"""Log-probabilities and entropies of the next token over a vocabulary that is split across tensor-parallel ranks.

The logits of a whole micro-batch never exist: the LM head and the softmax run chunk by chunk, forward and again in
backward (only two numbers a token are kept in between). A chunk's raw product is the only tensor of its size; the
float32 arithmetic on it goes block by block of its rows, which stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the padded vocabulary this rank holds.

    start: id of its first row. real: rows that are real tokens; the rest is padding and takes no probability.
    group: the tensor-parallel group, None for one rank.
    """

    start: int
    real: int
    group: dist.ProcessGroup | None

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)
        return x


CUT = -1e4  # a logit this far below the highest has probability 0 in float32
BLOCKS = 16  # of a chunk's rows: the float32 arithmetic on logits works on one at a time


def _products(hidden: Tensor, weight: Tensor, float32: bool) -> Tensor:
    """The LM head's raw product for one chunk, [tokens, rows], in the working precision."""
    if float32:
        hidden, weight = hidden.float(), weight.float()
    return hidden @ weight.T


def _blocks(products: Tensor) -> list[slice]:
    """Rows of a chunk, cut up so that temporaries are small against it."""
    rows = -(-len(products) // BLOCKS)
    return [slice(start, start + rows) for start in range(0, len(products), max(rows, 1))]


def _logits(products: Tensor, shard: VocabularyShard, temperature: float, shift: Tensor) -> Tensor:
    """A block's float32 logits minus `shift` [tokens], temperature applied, padding rows at -inf; a fresh tensor."""
    logits = products / temperature if products.dtype == torch.float32 else products.float().div_(temperature)
    logits -= shift[:, None]
    if shard.real < logits.shape[1]:
        logits[:, max(shard.real, 0) :] = -torch.inf
    return logits


def _own_labels(labels: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Row of each label on this rank (0 where it is another's), and whether it is here."""
    rows = labels - shard.start
    here = (rows >= 0) & (rows < shard.real)
    return torch.where(here, rows, 0), here


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabularyShard,
        temperature: float,
        chunk: int,
        float32: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprobs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            products = _products(hidden[part], weight, float32)
            rows, here = _own_labels(labels[part], shard)
            target = products.gather(1, rows[:, None]).squeeze(1).float() / temperature
            highest = shard.reduce(_highest(products, shard).float() / temperature, dist.ReduceOp.MAX)
            target = torch.where(here, target - highest, 0.0)
            # sum of exp, sum of exp * logit, the label's logit: one reduction for the three
            sums = torch.stack([torch.empty_like(highest), torch.empty_like(highest), target])
            for block in _blocks(products):
                logits = _logits(products[block], shard, temperature, highest[block])
                probabilities = logits.exp()
                torch.sum(probabilities, 1, out=sums[0, block])
                logits.clamp_(min=CUT)  # exp of it is 0 already, and 0 * -inf would not be
                torch.sum(probabilities.mul_(logits), 1, out=sums[1, block])
            sums = shard.reduce(sums)
            log_sum = sums[0].log()
            normalisers[part] = log_sum + highest
            logprobs[part] = sums[2] - log_sum
            entropies[part] = log_sum - sums[1] / sums[0]
            del products  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, labels, normalisers, entropies)  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)  # type: ignore[attr-defined]
        ctx.rest = (shard, temperature, chunk, float32)  # type: ignore[attr-defined]
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):  # type: ignore[no-untyped-def, override]
        hidden, weight, labels, normalisers, entropies = ctx.saved_tensors
        shard, temperature, chunk, float32 = ctx.rest
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalisers)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            products = _products(hidden[part], weight, float32)
            up, down = grad_logprobs[part], None if grad_entropies is None else grad_entropies[part]
            # d logprob / d logit = [is label] - p;  d entropy / d logit = -p (log p + entropy)
            for block in _blocks(products):
                log_p = _logits(products[block], shard, temperature, normalisers[part][block])
                probabilities = log_p.exp()
                if down is None:
                    probabilities *= -up[block, None]
                else:
                    log_p.clamp_(min=CUT).add_(entropies[part][block, None]).mul_(down[block, None])
                    probabilities *= log_p.add_(up[block, None]).neg_()
                products[block] = (
                    probabilities  # the products are not needed any more: their gradient's place
                )
            rows, here = _own_labels(labels[part], shard)
            products.scatter_add_(1, rows[:, None], (up * here)[:, None].to(products.dtype))
            products /= temperature
            grad_hidden[part] = products.to(weight.dtype) @ weight
            if products.dtype == torch.float32:
                grad_weight.addmm_(products.T, hidden[part].float())
            else:
                grad_weight += products.T @ hidden[part]
            del products
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _highest(products: Tensor, shard: VocabularyShard) -> Tensor:
    """The largest product of each token among the real rows; -inf where this rank has none."""
    if shard.real <= 0:
        return products.new_full((len(products),), -torch.inf)
    return products[:, : shard.real].amax(1)


def vocabulary_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each position, at the sampling temperature.

    hidden: [tokens, hidden_size], the same on every tensor-parallel rank; weight: this rank's rows of the LM head
    [rows, hidden_size]; labels: int64 [tokens]. float32: compute the LM head's product in float32, too.
    Returns float32 [tokens] twice, the same on every rank. Gradients of `hidden` are this rank's part: their sum
    over the tensor-parallel ranks is the whole (gather with a reduce-scatter backward, or copy with an all-reduce).
    """
    return _LogProbs.apply(hidden, weight, labels, shard, temperature, chunk, float32)  # type: ignore[no-any-return]
