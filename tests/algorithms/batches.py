"""Random ragged batches, and ways to cut, order and pad them that must not matter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

from megarl.algorithms import (
    RECIPES,
    LossOutput,
    Recipe,
    Totals,
    assign_advantages,
    get_recipe,
    policy_loss,
)
from megarl.algorithms.responses import Responses
from megarl.algorithms.weights import local_totals, token_weights
from megarl.errors import UserError
from megarl.records import Batch, MicroBatch, Prompt, Sample, WeightSpan

MAX_LENGTH = 16

few = settings(max_examples=4, derandomize=True, deadline=None, database=None)
many = settings(max_examples=20, derandomize=True, deadline=None, database=None)

PER_TOKEN = ("logprobs", "old_logprobs", "engine_logprobs", "ref_logprobs", "entropy", "mask")


@dataclass(frozen=True)
class Ragged:
    """Everything `policy_loss` can be given. Token vectors float32 [T], advantages float32 [R], one a response."""

    logprobs: Tensor
    old_logprobs: Tensor
    engine_logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    group_ids: Tensor

    @property
    def spans(self) -> list[tuple[int, int]]:
        cu = self.cu_seqlens.tolist()
        return list(pairwise(cu))

    @property
    def token_advantages(self) -> Tensor:
        """float32 [T]; 0 for padding after the last response."""
        spread = self.advantages.repeat_interleave(self.cu_seqlens.diff())
        return torch.nn.functional.pad(spread, (0, len(self.mask) - len(spread)))


def ragged(seed: int, *, drift: float = 0.3, responses: int | None = None) -> Ragged:
    """A batch with empty and fully masked responses among the others, and masked tokens anywhere."""
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 8, (), generator=g)) if responses is None else responses
    lengths = torch.randint(0, 8, (count,), generator=g)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    tokens = int(lengths.sum())

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=g)

    mask = torch.rand(tokens, generator=g) < 0.7
    for begin, end in pairwise(cu.tolist()):
        if torch.rand((), generator=g) < 0.15:
            mask[begin:end] = False
    old = -3.0 * torch.rand(tokens, generator=g)
    return Ragged(
        logprobs=old + noise(drift),
        old_logprobs=old,
        engine_logprobs=old + noise(0.5),
        ref_logprobs=old + noise(0.5),
        entropy=torch.rand(tokens, generator=g),
        mask=mask,
        cu_seqlens=cu,
        advantages=torch.randn(count, generator=g),
        group_ids=torch.randint(0, 3, (count,), generator=g) * 1000 - 7,
    )


def take(batch: Ragged, rows: list[int]) -> tuple[Ragged, Tensor]:
    """The batch of these responses in this order, and where its tokens were."""
    spans = [batch.spans[row] for row in rows]
    index = torch.tensor([t for begin, end in spans for t in range(begin, end)], dtype=torch.int64)
    lengths = torch.tensor([0] + [end - begin for begin, end in spans])
    picked = {name: getattr(batch, name)[index] for name in PER_TOKEN}
    order = torch.tensor(rows, dtype=torch.int64)
    return (
        Ragged(
            **picked,
            cu_seqlens=lengths.cumsum(0).int(),
            advantages=batch.advantages[order],
            group_ids=batch.group_ids[order],
        ),
        index,
    )


def shuffled_parts(count: int, parts: int, seed: int) -> list[list[int]]:
    """All rows in random order, dealt out to some parts of which some may be empty."""
    g = torch.Generator().manual_seed(seed)
    out: list[list[int]] = [[] for _ in range(parts)]
    for row in torch.randperm(count, generator=g).tolist():
        out[int(torch.randint(0, parts, (), generator=g))].append(row)
    return out


def with_masked(batch: Ragged, value: float) -> Ragged:
    """The same batch with `value` at every masked position of every float vector."""
    changed = {
        f.name: torch.where(batch.mask, getattr(batch, f.name), value)
        for f in fields(batch)
        if f.name in PER_TOKEN and f.name != "mask"
    }
    return replace(batch, **changed)


def every_combination() -> list[Recipe]:
    """Every recipe with every weight mode it allows."""
    out = []
    for name in RECIPES:
        for mode in ("token_mean", "group_token_mean", "sequence_mean", "constant"):
            try:
                out.append(get_recipe(name, weights=mode))
            except UserError:
                assert mode != RECIPES[name].weights
    return out


def totals_of(batch: Ragged) -> Totals:
    """The counts of a batch that is the whole one."""
    lengths = Responses.of(batch.mask, batch.cu_seqlens).active
    return local_totals(lengths=lengths, group_ids=batch.group_ids, max_length=MAX_LENGTH)


def weights_of(mode: str | Recipe, batch: Ragged, totals: Totals | None = None) -> Tensor:
    """The weights of a batch. totals: where it is a part of another."""
    return token_weights(mode, Responses.of(batch.mask, batch.cu_seqlens), totals or totals_of(batch))


def identify(recipe: Recipe) -> str:
    return f"{recipe.name}-{recipe.weights}"


def run(
    recipe: Recipe,
    batch: Ragged,
    *,
    totals: Totals | None = None,
    weights: Tensor | None = None,
    **changes: Any,
) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient with respect to the log-probabilities."""
    if weights is None:
        weights = weights_of(recipe, batch, totals)
    leaf = batch.logprobs.clone().requires_grad_()
    arguments = {
        "logprobs": leaf,
        "old_logprobs": batch.old_logprobs,
        "engine_logprobs": batch.engine_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "entropy": batch.entropy,
        "advantages": batch.token_advantages,
        "mask": batch.mask,
        "cu_seqlens": batch.cu_seqlens,
        "weights": weights,
    }
    output = policy_loss(recipe, **(arguments | changes))
    output.loss.backward()
    output = output._replace(loss=output.loss.detach())
    assert leaf.grad is not None
    return output, leaf.grad


def pack(mask: Tensor, cu_seqlens: Tensor, *, rows: list[int] | None = None, **columns: Tensor) -> MicroBatch:
    """A micro-batch of these responses; its tokens don't matter. rows: in their batch, all of it unless given."""
    zeros = torch.zeros(len(mask), dtype=torch.int64)
    chosen = range(len(cu_seqlens) - 1) if rows is None else rows
    numbers = torch.tensor(list(chosen), dtype=torch.int64)
    return MicroBatch(zeros, zeros, zeros, mask, cu_seqlens.int(), numbers, columns)


def filler() -> MicroBatch:
    """One masked padding token and no response: what replicas in step run on."""
    return pack(torch.tensor([False]), torch.tensor([0, 1]), rows=[])


def make_batch(
    rewards: Tensor, group_ids: Tensor, *micro_batches: MicroBatch, greedy_rewards: Tensor | None = None
) -> Batch:
    """One optimizer step's data of responses whose samples don't matter."""
    prompt = Prompt("p", np.zeros(1), "", "exact", {})
    nothing = (np.zeros(1), np.zeros(1), np.ones(1, dtype=bool), "stop", (WeightSpan(0, 0, 1),))
    samples = tuple(Sample(prompt, str(n), *nothing) for n in range(len(rewards)))
    greedy = torch.full_like(rewards, torch.nan) if greedy_rewards is None else greedy_rewards
    return Batch(samples, rewards, greedy, group_ids, micro_batches)


def alone(x: Tensor) -> Tensor:
    """`reduce_sum` of the only replica."""
    return x


def advantages_of(
    recipe: Recipe,
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    greedy_rewards: Tensor | None = None,
    reduce_sum: Callable[[Tensor], Tensor] = alone,
    **columns: Tensor,
) -> dict[str, Tensor]:
    """The columns of a rollout that is one micro-batch of one mini-batch."""
    micro_batch = pack(mask, cu_seqlens, **columns)
    batch = make_batch(rewards, group_ids, micro_batch, greedy_rewards=greedy_rewards)
    (out,) = assign_advantages([batch], recipe, reduce_sum)
    return dict(out.micro_batches[0].columns)


def assert_close(actual: Tensor, expected: Tensor, *, to: float = 1e-6) -> None:
    """Equal to `to`, relative to the largest entry expected."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    worst = float((actual.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    assert worst <= to * scale + 1e-9, f"apart by {worst:.3e} at a scale of {scale:.3e}"


class AllReduce(Protocol):
    def __call__(self, x: Tensor, how: Callable[..., Tensor] = torch.sum) -> Tensor: ...


def on_ranks(count: int, job: Callable[[int, AllReduce], Any]) -> list[Any]:
    """`job(rank, all_reduce)` on threads that meet in every all_reduce, as ranks of a group do."""
    barrier = threading.Barrier(count, timeout=30)
    slots: list[Tensor] = [torch.empty(0)] * count

    def main(rank: int) -> Any:
        def all_reduce(x: Tensor, how: Callable[..., Tensor] = torch.sum) -> Tensor:
            slots[rank] = x
            barrier.wait()
            out = how(torch.stack(slots), dim=0)
            barrier.wait()
            return out

        try:
            return job(rank, all_reduce)
        finally:
            if sys.exc_info()[0] is not None:
                barrier.abort()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(main, rank) for rank in range(count)]]
