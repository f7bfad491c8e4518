"""SHIM until the real one is merged."""

from dataclasses import replace

import numpy as np
import torch

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.token_advantages import token_advantages
from megarl.algorithms.weights import local_totals, token_weights


def _lengths(batch):
    out = torch.zeros(len(batch.group_ids), dtype=torch.int64)
    for m in batch.micro_batches:
        if len(m.rows):
            c = torch.stack([part.sum() for part in m.mask.split(m.cu_seqlens.diff().tolist())])
            out[m.rows] = c
    return out


def add_token_weights(batch, mode, *, max_length=None, reduce_sum):
    totals = local_totals(lengths=_lengths(batch), group_ids=batch.group_ids)
    totals = totals._replace(counts=reduce_sum(totals.counts))
    ms = [
        m.with_columns(
            weights=token_weights(
                mode,
                mask=m.mask,
                cu_seqlens=m.cu_seqlens,
                group_ids=batch.group_ids[m.rows],
                max_length=max_length,
                totals=totals.select(m.rows),
            )
        )
        for m in batch.micro_batches
    ]
    return replace(batch.with_micro_batches(ms), active_tokens=int(totals.counts[0]))


def assign_advantages(batches, recipe, reduce_sum):
    greedy = torch.cat([b.greedy_rewards for b in batches]) if recipe.needs_greedy else None
    rewards = torch.cat([b.rewards for b in batches])
    ids = torch.cat([b.group_ids for b in batches])
    starts = np.cumsum([0, *(len(b.group_ids) for b in batches)])
    if not recipe.has_late_advantages:
        whole = compute_advantages(
            recipe,
            rewards=rewards,
            group_ids=ids,
            lengths=torch.cat([_lengths(b) for b in batches]),
            greedy_rewards=greedy,
            reduce_sum=reduce_sum,
        )
        parts = whole.split([len(b.group_ids) for b in batches])
        from megarl.algorithms.responses import Responses

        return [
            b.with_micro_batches(
                m.with_columns(
                    advantages=Responses.of(m.mask, m.cu_seqlens).per_token(p[m.rows], "a")
                    if len(m.rows)
                    else torch.zeros(m.tokens)
                )
                for m in b.micro_batches
            )
            for b, p in zip(batches, parts)
        ]
    real = [(m, m.rows + int(s)) for s, b in zip(starts, batches) for m in b.micro_batches if len(m.rows)]
    nothing = torch.empty(0, dtype=torch.int64)
    rows = torch.cat([nothing, *(r for _, r in real)])
    col = lambda n: (
        torch.cat([nothing.float(), *(m.columns[n] for m, _ in real)])
        if all(n in m.columns for m, _ in real)
        else None
    )
    made = token_advantages(
        recipe,
        rewards=rewards[rows],
        group_ids=ids[rows],
        mask=torch.cat([nothing.bool(), *(m.mask for m, _ in real)]),
        cu_seqlens=torch.nn.functional.pad(
            torch.cat([nothing, *(m.cu_seqlens.diff() for m, _ in real)]).cumsum(0), (1, 0)
        ).int(),
        old_logprobs=col("old_logprobs"),
        ref_logprobs=col("ref_logprobs"),
        values=col("values"),
        greedy_rewards=None if greedy is None else greedy[rows],
        reduce_sum=reduce_sum,
    )
    start = 0
    out = []
    for b in batches:
        ms = []
        for m in b.micro_batches:
            n = m.tokens if len(m.rows) else 0
            z = torch.zeros(m.tokens)
            ms.append(
                m.with_columns(
                    advantages=made.advantages[start : start + n] if n else z,
                    returns=made.returns[start : start + n] if n else z,
                )
            )
            start += n
        out.append(b.with_micro_batches(ms))
    return out
