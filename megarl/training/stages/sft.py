"""Supervised fine-tuning on demonstrations: the cold start before reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.algorithms import add_token_weights
from megarl.megatron.policy import Policy
from megarl.training.clock import Clock
from megarl.training.learning import learn
from megarl.training.objectives.cross_entropy import CrossEntropy
from megarl.training.resolve import StagePlan
from megarl.training.run import Run
from megarl.training.sources.demonstrations import DemonstrationBatches
from megarl.training.stages.settings import SftSettings
from megarl.training.stages.stage import AuxiliaryModels, Stage


class SftStage(Stage):
    """Steps of cross-entropy, each on a batch of demonstrations; the mean over all of a step's learned tokens."""

    title = "Cold start"
    syncs_engine = False

    def __init__(
        self,
        plan: StagePlan,
        settings: SftSettings,
        policy: Policy,
        source: DemonstrationBatches,
        clock: Clock,
        *,
        save_every: int,
    ) -> None:
        super().__init__(plan.name, plan.steps, source, AuxiliaryModels())
        self.settings, self.policy, self.clock, self.save_every = settings, policy, clock, save_every
        self.objective = CrossEntropy()

    def prepare(self) -> None:
        self.policy.set_optimizer(self.settings.optimizer, self.steps)

    def step(self, step: int, policy_version: int) -> dict[str, float]:
        """Learn from the next batch of demonstrations."""
        reduce_sum = self.policy.groups.sum_over_replicas
        with self.clock.phase("cold start"):
            batches = [
                add_token_weights(batch, "token_mean", reduce_sum=reduce_sum)
                for batch in self.source.next(step)
            ]
            learned = learn(self.policy, batches, self.objective)
        last = learned.steps[-1]
        return learned.metrics | {
            "sft/grad_norm": last.grad_norm,
            "sft/lr": last.lr,
            "sft/tokens": float(sum(batch.active_tokens or 0 for batch in batches)),
            "sft/skipped_steps": float(step - self.policy.steps_taken),
        }

    def headline(self, metrics: Mapping[str, float]) -> str:
        return f"{self.title}, loss {metrics['sft/loss']:.3f}"

    def is_logged(self, step: int) -> bool:
        return step % self.settings.log_every == 0 or step == self.steps

    def is_evaluated(self, step: int) -> bool:
        return False

    def is_saved(self, step: int) -> bool:
        return bool(self.save_every) and step % self.save_every == 0 and step < self.steps


def open_stage(run: Run, plan: StagePlan, settings: SftSettings) -> SftStage:
    """Open the stage on this rank."""
    config = run.plan.config
    assert run.demonstrations is not None
    source = DemonstrationBatches(
        run.demonstrations,
        run.policy,
        batch_size=settings.batch_size,
        token_budget=config.batching.micro_batch_tokens,
    )
    return SftStage(plan, settings, run.policy, source, run.clock, save_every=config.checkpoint.sft_every)
