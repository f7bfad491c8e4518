"""Held-out accuracy: greedy answers to prompts that are never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.monitor.progress import progress
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import as_metric, merge_counts, rollout_counts, sample_groups
from megarl.training.run import Run

NAMES = ("accuracy", "reward_mean", "response_length_mean", "truncated_share", "unscored")
OF_EACH_SET = ("accuracy", "response_length_mean")


def evaluate(run: Run, *, step: int) -> dict[str, float]:
    """Metrics over all held-out prompts, and some of each set where there are several. Each replica answers its share.
    Collective."""
    groups, config = run.groups, run.config
    sets = sorted(run.prompts.heldout)
    everything = [(name, p) for name in sets for p in run.prompts.heldout[name]]
    mine = everything[groups.replica_index :: groups.replica_count]
    counts = None
    if groups.is_leader:
        with progress("Evaluating", len(mine), unit="prompts", enabled=groups.is_main) as bar:
            answered = sample_groups(
                run.engine_handle.client,
                run.scorer,
                [prompt for _, prompt in mine],
                group_size=1,
                sampling=SamplingParams(
                    max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
                    temperature=0.0,
                    stop_token_ids=tuple(run.tokenizer.stop_token_ids),
                ),
                decode=run.tokenizer.decode,
                seed=config.seed,
                step=step,
                on_response=bar.advance,
            )
        counts = [
            rollout_counts([g for g, (n, _) in zip(answered, mine, strict=True) if n in names])
            for names in (sets, *([name] for name in sets))
        ]
    whole, *parts = zip(*groups.gather_from_replicas(groups.share_in_replica(counts)), strict=True)
    metrics = _chosen(whole, "eval", NAMES)
    if len(sets) > 1:
        for name, part in zip(sets, parts, strict=True):
            metrics |= _chosen(part, f"eval/{as_metric(name)}", OF_EACH_SET)
    return metrics | {"eval/prompts": float(len(everything))}


def _chosen(
    parts: Sequence[Mapping[str, tuple[float, float]]], prefix: str, names: Sequence[str]
) -> dict[str, float]:
    merged = merge_counts(parts, prefix)
    wanted = (f"{prefix}/{name}" for name in names)
    return {name: merged[name] for name in wanted if name in merged}
