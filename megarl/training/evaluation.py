"""Held-out accuracy: greedy answers to prompts that are never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.data.tokenizer import ChatTokenizer
from megarl.megatron.groups import Groups
from megarl.monitor.progress import progress
from megarl.records import Prompt
from megarl.rewards import Scorer
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import as_metric, merge_counts, rollout_counts, sample_groups
from megarl.training.engines import EngineHandle

NAMES = ("accuracy", "reward_mean", "response_length_mean", "truncated_share", "unscored")
OF_EACH_SET = ("accuracy", "response_length_mean")


@dataclass(frozen=True)
class Evaluation:
    """Greedy answers to the held-out prompts of each set, scored. max_new_tokens: longest answer."""

    heldout: Mapping[str, Sequence[Prompt]]
    engine: EngineHandle
    scorer: Scorer
    tokenizer: ChatTokenizer
    groups: Groups
    max_new_tokens: int
    seed: int

    def evaluate(self, *, step: int) -> dict[str, float]:
        """Return metrics over all held-out prompts, and some of each set where there are several. Each replica answers
        its share. Collective."""
        sets, groups = sorted(self.heldout), self.groups
        everything = [(name, p) for name in sets for p in self.heldout[name]]
        mine = everything[groups.replica_index :: groups.replica_count]
        counts = None
        if groups.is_leader:
            with progress("Evaluating", len(mine), unit="prompts", enabled=groups.is_main) as bar:
                answered = sample_groups(
                    self.engine.client,
                    self.scorer,
                    [prompt for _, prompt in mine],
                    group_size=1,
                    sampling=SamplingParams(
                        max_new_tokens=self.max_new_tokens,
                        temperature=0.0,
                        stop_token_ids=tuple(self.tokenizer.stop_token_ids),
                    ),
                    decode=self.tokenizer.decode,
                    seed=self.seed,
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
