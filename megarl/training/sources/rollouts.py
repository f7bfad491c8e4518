"""Rollouts: prompts of the stream, sampled by the replica's engine, scored, filtered, packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.data.stream import Dealt, PromptStream
from megarl.data.tokenizer import ChatTokenizer
from megarl.megatron.policy import Policy
from megarl.monitor.progress import progress
from megarl.monitor.samples import SampleWriter
from megarl.records import Batch, Group
from megarl.rewards import RewardSettings, Scorer
from megarl.rollout.engine import SamplingParams
from megarl.rollout.filters import apply_overlong_penalty, filter_stale, sample_until_enough
from megarl.rollout.sampling import merge_counts, rollout_counts, sample_groups
from megarl.routing.store import RouteStore
from megarl.training.clock import Clock
from megarl.training.engines import EngineHandle
from megarl.training.minibatches import make_minibatches
from megarl.training.routes import share_groups


@dataclass(frozen=True)
class RolloutSettings:
    """What a step samples, and what becomes of it.

    prompts: of a step, over all replicas. group_size: responses to each. sampling_rounds: of a step, where dynamic
    sampling drops groups. greedy: one greedy response to each prompt as well. routes_in_memory: bytes of the engine's
    routes before they go to a file; None = the engine is not asked for them.
    """

    prompts: int
    group_size: int
    sampling: SamplingParams
    rewards: RewardSettings
    dynamic_sampling: bool
    sampling_rounds: int
    greedy: bool
    max_staleness: int
    stale_responses: str
    minibatches: int
    token_budget: int
    routes_in_memory: int | None
    seed: int


@dataclass
class Rollouts:
    """The mini-batches that the steps of reinforcement learning learn from.

    policy_version: of the weights that the engine holds and that are trained now; set by the stage after each sync.
    routes: the engine's routes of the current step.
    """

    settings: RolloutSettings
    prompt_stream: PromptStream
    engine: EngineHandle
    scorer: Scorer
    tokenizer: ChatTokenizer
    policy: Policy
    writer: SampleWriter
    clock: Clock
    policy_version: int = 0
    routes: RouteStore | None = field(default=None, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def next(self, step: int) -> list[Batch]:
        """Sample and score a step's groups, write some, leave stale ones out, and pack them into mini-batches."""
        settings, ranks = self.settings, self.policy.groups
        self.release()
        if settings.routes_in_memory is not None:
            self.routes = RouteStore(in_memory_bytes=settings.routes_in_memory)
        with self.clock.phase("generate"):
            groups = self.sample(step)
        ranks.on_main(lambda: self.writer.write(step, groups))
        groups, staleness = filter_stale(
            groups,
            version=self.policy_version,
            most=settings.max_staleness,
            then=settings.stale_responses,  # type: ignore[arg-type]
        )
        counts = rollout_counts(groups) | staleness
        self.metrics = merge_counts(ranks.gather_from_replicas(counts), "rollout")
        with self.clock.phase("train"):
            return make_minibatches(
                groups,
                settings.minibatches,
                self.policy,
                token_budget=settings.token_budget,
                seed=settings.seed,
                step=step,
            )

    def sample(self, step: int) -> list[Group]:
        """Return this replica's groups of a step: sampled and scored by its leader, shared with its ranks.

        With dynamic sampling (DAPO, arXiv:2503.14476, Eq. 11) groups whose rewards are all equal are dropped and others
        sampled in their place, for up to `sampling_rounds` rounds; the dropped ones are returned, too. Collective.
        """
        settings, ranks, before = self.settings, self.policy.groups, self.prompt_stream.drawn
        groups = sample_until_enough(
            lambda missing: self._sample_round(self.prompt_stream.deal(missing), step, before),
            wanted=settings.prompts // ranks.replica_count,
            rounds=settings.sampling_rounds if settings.dynamic_sampling else 1,
            dynamic=settings.dynamic_sampling,
            gather=ranks.gather_from_replicas,
        )
        return [
            apply_overlong_penalty(group, settings.rewards, settings.sampling.max_new_tokens)
            for group in groups
        ]

    def _sample_round(self, dealt: Dealt, step: int, before: int) -> list[Group]:
        """before: the prompts that were drawn before this step."""
        settings, ranks = self.settings, self.policy.groups
        sampled = None
        if not dealt.prompts:
            return []
        if ranks.is_leader:
            total = len(dealt.prompts) * (settings.group_size + settings.greedy)
            with progress(f"Step {step}: generating", total, unit="responses", enabled=ranks.is_main) as bar:
                sampled = sample_groups(
                    self.engine.client,
                    self.scorer,
                    dealt.prompts,
                    group_size=settings.group_size,
                    sampling=settings.sampling,
                    decode=self.tokenizer.decode,
                    seed=settings.seed,
                    step=step,
                    draw_offset=dealt.first - before,
                    return_routes=self.routes is not None,
                    greedy=settings.greedy,
                    on_response=bar.advance,
                )
        return share_groups(self.policy, sampled, self.routes)

    def release(self) -> None:
        """Free the step's routes."""
        if self.routes is not None:
            self.routes.close()
            self.routes = None

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.prompt_stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompt_stream.load_state_dict(state["stream"])
