"""Reinforcement learning with verifiable rewards. One step, top to bottom, is `RlStage.step`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from megarl.config.schema import Config
from megarl.megatron.critic import Critic
from megarl.megatron.reference import ReferencePolicy
from megarl.monitor.samples import SampleWriter
from megarl.records import Batch
from megarl.rollout.engine import SamplingParams
from megarl.training.clock import Clock
from megarl.training.engines import EngineHandle, sync_weights
from megarl.training.minibatches import draw_audit
from megarl.training.resolve import StagePlan
from megarl.training.run import Run
from megarl.training.scoring import audit, store_metrics, with_engine_routes
from megarl.training.sources.rollouts import Rollouts, RolloutSettings
from megarl.training.stages.settings import RlSettings
from megarl.training.stages.stage import AuxiliaryModels, Stage
from megarl.training.update import PolicyUpdate
from megarl.weights.exchange import iter_hf_tensors
from megarl.weights.mapping import NameMap


class RlStage(Stage):
    """Steps that sample, score, learn and sync."""

    title = "RL"
    syncs_engine: ClassVar[bool] = True
    source: Rollouts

    def __init__(
        self,
        plan: StagePlan,
        settings: RlSettings,
        config: Config,
        update: PolicyUpdate,
        source: Rollouts,
        engine: EngineHandle,
        name_map: NameMap,
        clock: Clock,
    ) -> None:
        super().__init__(plan.name, plan.steps, source, update.models)
        self.settings, self.config, self.update, self.engine = settings, config, update, engine
        self.name_map, self.clock, self.policy = name_map, clock, update.policy

    def prepare(self) -> None:
        settings, recipe = self.settings, self.update.recipe
        optimizer_steps = self.steps * self.source.settings.minibatches
        self.policy.set_optimizer(settings.optimizer, optimizer_steps)
        if "ref_logprobs" in recipe.needs:
            self.models.reference = ReferencePolicy(self.policy)
        if "values" in recipe.needs:
            self.models.critic = Critic(self.policy)
            self.models.critic.set_optimizer(settings.critic.optimizer, optimizer_steps)

    def step(self, step: int, policy_version: int) -> dict[str, float]:
        """Sample, score, learn, sync."""
        start, self.source.policy_version = time.perf_counter(), policy_version
        batches = self.source.next(step)
        with self.clock.phase("train"):
            if self.source.routes is not None:
                batches = with_engine_routes(batches, self.source.routes, self.policy)
            metrics = self._audit(batches, step)
            batches = self.update.score(batches)
            metrics |= self.update.learn(batches)
            if self.source.routes is not None:
                metrics |= store_metrics(self.source.routes, self.policy)
                self.source.release()
        with self.clock.phase("sync"):
            tensors = iter_hf_tensors(self.name_map)
            metrics |= sync_weights(self.engine, tensors, self.policy.groups, version=policy_version + 1)
        replace_every = self.settings.reference.replace_every
        if self.models.reference is not None and replace_every and step % replace_every == 0:
            self.models.reference.replace()
        return metrics | self.source.metrics | self._timings(time.perf_counter() - start)

    def _audit(self, batches: Sequence[Batch], step: int) -> dict[str, float]:
        """Every `rl.audit_every` steps, compare a sample's log-probabilities from engine and trainer."""
        settings, replicas = self.settings, self.policy.groups.replica_count
        if not settings.audit_every or step % settings.audit_every:
            return {}
        drawn = draw_audit(
            batches,
            self.policy,
            token_budget=self.source.settings.token_budget,
            responses=-(-settings.audit_responses // replicas),
            seed=self.config.seed,
            step=step,
        )
        return audit(drawn, self.policy, self.update.temperature)

    def _timings(self, step_time: float) -> dict[str, float]:
        seconds, tokens = self.clock.take_step(), self.source.metrics["rollout/tokens"]
        return {
            "perf/step_time": step_time,
            "perf/generate_seconds": seconds["generate"],
            "perf/train_seconds": seconds["train"],
            "sync/seconds": seconds["sync"],
            "perf/tokens_per_second": tokens / step_time,
            "perf/generate_tokens_per_second": tokens / seconds["generate"],
        }

    def is_evaluated(self, step: int) -> bool:
        every = self.config.evaluation.every
        return step == self.steps or bool(every and step % every == 0)

    def is_saved(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return step == self.steps or bool(every and step % every == 0)


def open_stage(run: Run, plan: StagePlan, rl: RlSettings) -> RlStage:
    """Open the stage on this rank."""
    config, recipe, sources = run.plan.config, run.plan.recipe, run.plan.sources
    wants_routes = sources.routing_replay == "engine" or rl.compare_routes
    settings = RolloutSettings(
        prompts=rl.prompts_per_step,
        group_size=rl.group_size,
        sampling=SamplingParams(
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            min_p=config.sampling.min_p,
            stop_token_ids=tuple(run.tokenizer.stop_token_ids),
        ),
        rewards=config.rewards,
        dynamic_sampling=recipe.dynamic_sampling,
        sampling_rounds=rl.sampling_rounds,
        greedy="greedy_rewards" in recipe.needs,
        max_staleness=rl.max_staleness,
        stale_responses=rl.stale_responses,
        minibatches=run.plan.minibatches,
        token_budget=config.batching.micro_batch_tokens,
        routes_in_memory=rl.routes_in_memory_mib << 20 if wants_routes else None,
        seed=config.seed,
    )
    writer = SampleWriter(run.plan.folder, every=config.log.samples_every, enabled=run.groups.is_main)
    source = Rollouts(
        settings,
        run.prompt_stream,
        run.engine_handle,
        run.scorer,
        run.tokenizer,
        run.policy,
        writer,
        run.clock,
    )
    update = PolicyUpdate(
        run.policy,
        recipe,
        sources,
        AuxiliaryModels(),
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    return RlStage(plan, rl, config, update, source, run.engine_handle, run.name_map, run.clock)
