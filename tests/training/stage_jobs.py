"""A kind of stage that is not megarl's, and a run that has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.training.resolve import StagePlan
from megarl.training.run import Run
from megarl.training.sources.demonstrations import DemonstrationBatches
from megarl.training.stages.settings import StageSettings
from megarl.training.stages.sft import SftStage
from megarl.training.state import RunState, find_checkpoint
from megarl.training.train import run_stages
from tests.training.jobs import open_tiny, saver_of


class PolishStage(SftStage):
    """The cold start once more, at half its rate, logged and saved after every step."""

    title = "Polish"

    def prepare(self) -> None:
        optimizer = self.settings.optimizer
        self.policy.set_optimizer(optimizer.model_copy(update={"lr": optimizer.lr / 2}), self.steps)

    def is_logged(self, step: int) -> bool:
        return True

    def is_saved(self, step: int) -> bool:
        return True


class PolishSettings(StageSettings):
    """Settings of the stage: a number of steps is all it has."""

    def open(self, run: Run, plan: StagePlan) -> PolishStage:
        assert run.demonstrations is not None
        source = DemonstrationBatches(run.demonstrations, run.policy, batch_size=8, token_budget=4096)
        return PolishStage(plan, run.plan.config.sft, run.policy, source, run.clock, save_every=1)


def users_stage_job(folder: Path, steps: int) -> dict[str, Any]:
    """A run of a cold start and so many steps of the stage; where its last checkpoint stands."""
    run = open_tiny(
        folder, "sft.steps=2", "launch.ranks=1", "parallel.expert=1", "checkpoint.export_hf=false"
    )
    polish = StagePlan("polish", PolishSettings(steps=steps), first=2)
    run.plan = replace(run.plan, stages=(run.plan.stages[0], polish))
    saver = saver_of(run)
    found = find_checkpoint(run.plan, run.groups)
    run_stages(run, found.state if found else RunState.at_start(run.plan), found, saver)
    saver.close()
    found = find_checkpoint(run.plan, run.groups)
    run.close()
    assert found is not None
    state = found.state
    return {
        "stage": state.stage,
        "step": state.step,
        "global": state.global_step,
        "version": state.policy_version,
    }
