"""Random ragged batches, and ways to cut, order and pad them that must not matter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from hypothesis import settings
from torch import Tensor

from megarl.algorithms import RECIPES, LossOutput, Recipe, Totals, get_recipe, policy_loss, token_weights
from megarl.errors import UserError

MAX_LENGTH = 16

few = settings(max_examples=4, derandomize=True, deadline=None, database=None)
many = settings(max_examples=20, derandomize=True, deadline=None, database=None)

PER_TOKEN = ("logprobs", "old_logprobs", "engine_logprobs", "ref_logprobs", "entropy", "mask")


@dataclass(frozen=True)
class Ragged:
    """Everything `policy_loss` can be given. Token vectors float32 [T], advantages float32 [R]."""

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


def identify(recipe: Recipe) -> str:
    return f"{recipe.name}-{recipe.weights}"


def run(
    recipe: Recipe,
    batch: Ragged,
    *,
    totals: Totals | None = None,
    weights: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    **changes: Any,
) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient with respect to the log-probabilities."""
    if weights is None:
        weights = token_weights(
            recipe.weights,
            mask=batch.mask,
            cu_seqlens=batch.cu_seqlens,
            group_ids=batch.group_ids,
            max_length=MAX_LENGTH,
            totals=totals,
        )
    leaf = batch.logprobs.clone().requires_grad_()
    arguments = {
        "logprobs": leaf,
        "old_logprobs": batch.old_logprobs,
        "engine_logprobs": batch.engine_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "entropy": batch.entropy,
        "advantages": batch.advantages,
        "mask": batch.mask,
        "cu_seqlens": batch.cu_seqlens,
        "weights": weights,
    }
    output = policy_loss(recipe, **(arguments | changes), reduce_sequence_sum=reduce)
    output.loss.backward()
    output = output._replace(loss=output.loss.detach())
    assert leaf.grad is not None
    return output, leaf.grad


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
