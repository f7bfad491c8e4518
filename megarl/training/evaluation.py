"""Held-out accuracy: greedy answers to prompts that are never trained on."""

from __future__ import annotations

from megarl.data.demonstrations import shows_work
from megarl.monitor.progress import progress
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import merge_counts, rollout_counts, sample_groups
from megarl.training.run import Run, engine_of

NAMES = ("accuracy", "reward_mean", "response_length_mean", "worked_share", "truncated_share", "unscored")


def evaluate(run: Run, *, step: int) -> dict[str, float]:
    """Metrics over all held-out prompts, each replica answering its share. Collective."""
    groups, config = run.groups, run.config
    everything = [p for name in sorted(run.prompts.heldout) for p in run.prompts.heldout[name]]
    mine = everything[groups.replica_index :: groups.replica_count]
    counts = None
    if groups.is_leader:
        with progress("Evaluating", len(mine), unit="prompts", enabled=groups.is_main) as bar:
            answered = sample_groups(
                engine_of(run),
                run.scorer,
                mine,
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
        counts = rollout_counts(answered, shows_work)
    merged = merge_counts(groups.gather_from_replicas(groups.share_in_replica(counts)), "eval")
    metrics = {f"eval/{name}": merged[f"eval/{name}"] for name in NAMES if f"eval/{name}" in merged}
    return metrics | {"eval/prompts": float(len(everything))}
