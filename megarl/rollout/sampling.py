"""A sampling round: prompts to an engine, responses to the scorer as they come, groups out.

Scoring never waits for the round's end. Each response has a seed of its own, made from the run's seed, the step and
its place, so that a resumed run draws what an unbroken one would have drawn.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.records import Group, Prompt, Sample
from megarl.rewards import Scorer, reason_kind
from megarl.rollout.engine import Engine, GenerateRequest, GenerateResult, SamplingParams
from megarl.rollout.filters import is_right
from megarl.seeds import draw_seed


def sample_groups(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    sampling: SamplingParams,
    decode: Callable[[np.ndarray], str],
    seed: int,
    step: int,
    draw_offset: int = 0,
    return_routes: bool = False,
    greedy: bool = False,
    on_response: Callable[[], None] = lambda: None,
) -> list[Group]:
    """Return `group_size` scored responses to each prompt, in the prompts' order.

    decode: token ids -> text. draw_offset: prompts drawn before in this step, by all replicas; a prompt that comes
    again gets other seeds and sample ids. greedy: one greedy response to each prompt as well, for its reward alone.

    Raises UserError for a prompt that no retry can mend, EngineError if the engine fails.
    """
    greedily = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
    requests, places = [], {}  # place: number of the prompt, number in its group
    for n, prompt in enumerate(prompts):
        for k in range(group_size + greedy):
            name = f"{prompt.prompt_id}#{step}.{draw_offset + n}.{k}"
            own_seed = draw_seed(seed, step, prompt.prompt_id, draw_offset + n, k)
            own = replace(sampling if k < group_size else greedily, seed=own_seed)
            requests.append(GenerateRequest(name, prompt.token_ids, own, return_routes))
            places[name] = n, k

    async def round_() -> dict[tuple[int, int], Sample]:
        scoring: dict[tuple[int, int], asyncio.Task[Sample]] = {}
        async for result in engine.generate(requests):
            n, k = places[result.request_id]
            sample = _sample(prompts[n], result, decode)
            scoring[n, k] = asyncio.create_task(scorer.score(sample))
            on_response()
        return dict(zip(scoring, await asyncio.gather(*scoring.values()), strict=True))

    scored = asyncio.run(round_())
    return [
        Group(
            prompt,
            tuple(scored[n, k] for k in range(group_size)),
            greedy_reward=scored[n, group_size].reward if greedy else None,
        )
        for n, prompt in enumerate(prompts)
    ]


def _sample(prompt: Prompt, result: GenerateResult, decode: Callable[[np.ndarray], str]) -> Sample:
    return Sample(
        prompt=prompt,
        sample_id=result.request_id,
        response_ids=result.response_ids,
        logprobs=result.logprobs,
        loss_mask=np.ones(len(result.response_ids), dtype=np.bool_),
        finish_reason=result.finish_reason,
        spans=result.spans,
        routes=result.routes,
        text=decode(result.response_ids),
    )


def rollout_counts(groups: Sequence[Group]) -> dict[str, tuple[float, float]]:
    """Describe a round as (sum, count) pairs that add up over replicas."""
    samples = [s for g in groups for s in g.samples]
    scored = [s.reward for s in samples if s.reward is not None]
    lengths = [len(s.response_ids) for s in samples]
    judged = [[right for s in g.samples if (right := is_right(s)) is not None] for g in groups]
    judged = [verdicts for verdicts in judged if verdicts]
    spreads = [np.std(r) for g in groups if (r := [s.reward for s in g.samples if s.reward is not None])]
    counts = {
        "reward_mean": (math.fsum(scored), len(scored)),
        "reward_std": (math.fsum(map(float, spreads)), len(spreads)),
        "accuracy": (sum(map(sum, judged)), sum(map(len, judged))),
        "response_length_mean": (sum(lengths), len(lengths)),
        "prompt_length_mean": (sum(len(g.prompt.token_ids) for g in groups), len(groups)),
        "truncated_share": (sum(s.finish_reason == "length" for s in samples), len(samples)),
        "aborted_share": (sum(s.finish_reason == "abort" for s in samples), len(samples)),
        "unscored": (sum(s.reward is None for s in samples), 1),
        "responses": (len(samples), 1),
        "tokens": (sum(lengths), 1),
        "groups": (len(groups), 1),
        "groups_kept": (sum(g.dropped is None for g in groups), 1),
        "groups_all_correct": (sum(map(all, judged)), 1),
        "groups_all_wrong": (sum(not any(verdicts) for verdicts in judged), 1),
    }
    reasons = Counter(g.dropped for g in groups if g.dropped is not None)
    counts |= {f"{DROPPED}{reason}": (number, 1) for reason, number in reasons.items()}
    kinds = Counter(reason_kind(s.unscored_reason or "") for s in samples if s.reward is None)
    counts |= {f"{UNSCORED}{kind}": (number, 1) for kind, number in kinds.items()}
    parts: dict[str, list[float]] = {}
    for s in samples:
        for part, share in s.reward_parts.items():
            if share is not None:
                parts.setdefault(as_metric(part), []).append(share)
    counts |= {f"reward_part/{name}": (math.fsum(values), len(values)) for name, values in parts.items()}
    return {name: (float(total), float(count)) for name, (total, count) in counts.items()}


def as_metric(name: str) -> str:
    """Return the name as it may stand in a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", ".", name)


DROPPED = "groups_dropped/"
UNSCORED = "unscored_reason/"
TOTALS = (
    "unscored",
    "responses",
    "tokens",
    "groups",
    "groups_kept",
    "groups_all_correct",
    "groups_all_wrong",
    "stale_responses",
)


def merge_counts(parts: Sequence[Mapping[str, tuple[float, float]]], prefix: str) -> dict[str, float]:
    """Join the counts of all replicas: means weighted by counts, totals added up. A mean over nothing is left out."""
    merged: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part}):
        here = [part[name] for part in parts if name in part]
        total, count = (math.fsum(values) for values in zip(*here, strict=True))
        if name in TOTALS or name.startswith((DROPPED, UNSCORED)):
            merged[f"{prefix}/{name}"] = total
        elif count:
            merged[f"{prefix}/{name}"] = total / count
    return merged
