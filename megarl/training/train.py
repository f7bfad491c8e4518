"""A run from beginning to end: open, resume, stage after stage, export, summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial

from megarl.config.load import to_yaml
from megarl.config.schema import Config
from megarl.errors import EXIT_USER_ERROR, UserError
from megarl.megatron.groups import Groups, destroy_groups, report_error_once
from megarl.monitor.alarms import AlarmStop
from megarl.monitor.files import write_atomic
from megarl.monitor.jsonl import read_metrics
from megarl.monitor.logger import METRICS_FILE, open_logger
from megarl.monitor.progress import progress
from megarl.monitor.report import print_summary
from megarl.monitor.signals import Stopped, StopSignals, name_of
from megarl.monitor.status import print_status
from megarl.training.describe import describe_plan
from megarl.training.engines import sync_weights
from megarl.training.export import export_hf
from megarl.training.folder import refuse_used_folder
from megarl.training.resolve import Plan, StagePlan, resolve
from megarl.training.run import Run, join_ranks, open_run
from megarl.training.saving import Saver
from megarl.training.stages.stage import Stage
from megarl.training.state import (
    FoundCheckpoint,
    RunState,
    checkpoints_folder,
    find_checkpoint,
    load_found,
)
from megarl.weights.exchange import iter_hf_tensors


def train(config: Config, stop: StopSignals | None = None) -> None:
    """Run it on this rank; all ranks call it. Raises UserError for what the user can mend, and Stopped on every rank
    when any of them was told to end. stop: where this process notes such signals."""
    stop = stop or StopSignals()
    with report_error_once():
        plan = resolve(config, int(os.environ.get("WORLD_SIZE", 1)))
        groups, lock = join_ranks(plan)
        found = find_checkpoint(plan, groups) if config.checkpoint.resume else None
        if found is None:
            groups.on_main(lambda: refuse_used_folder(plan.folder, resume=config.checkpoint.resume))
        state = found.state if found else _at_start(plan, groups)
        began = datetime.fromisoformat(state.began)
        run = open_run(plan, groups, lock, plan.stages_from(state.stage), began)
        run.stop = stop
        saver = Saver(run.policy, checkpoints_folder(run.plan.folder), run.plan.config.checkpoint)
        stop.can_save()
        try:
            run_stages(run, state, found, saver)
        except AlarmStop:  # every rank raises it at the same step
            saver.finish()
            raise
        finally:
            stop.is_closing()
            saver.close()
            run.close(_exit_code(sys.exc_info()[1]))
    destroy_groups()


def _at_start(plan: Plan, groups: Groups) -> RunState:
    """The state before the first step, by the main rank's clock and disk. Collective."""
    return groups.share_from_main(RunState.at_start(plan) if groups.is_main else None)


def run_stages(run: Run, state: RunState, found: FoundCheckpoint | None, saver: Saver) -> None:
    """Go through the stages that are left, from the checkpoint found or the start, then export. Collective."""
    plan, config = run.plan, run.plan.config
    if run.groups.is_main:
        print_status(_describe(run))
    opened = False
    for stage_plan in plan.stages_from(state.stage):
        stage = stage_plan.settings.open(run, stage_plan)
        if found:
            load_found(run, stage, found)
        else:
            stage.prepare()
        if not opened:
            run.groups.on_main(partial(_open_files, run, stage, found))
            opened = True
        if not found:
            state = _begin_stage(run, stage, stage_plan, state, saver)
        elif stage.syncs_engine:
            _sync(run, state)
        if told := run.told_to_stop():
            saver.finish()
            raise _stopped(run, told, state, saved=found is not None or stage.syncs_engine)
        state, found = run_stage(run, stage, state, saver), None
    saver.finish()
    results = {"run folder": plan.folder}
    if config.checkpoint.export_hf:
        results["Hugging Face checkpoint"] = export_hf(run)
    if run.groups.is_main:
        title = f"Run {config.name!r}: {plan.recipe.name}, {config.rl.steps} steps"
        print_summary(title, state.before, state.after, run.clock.total, results)


def run_stage(run: Run, stage: Stage, state: RunState, saver: Saver) -> RunState:
    """Take the steps of a stage that are left. Returns where the run stands then. Collective."""
    left = max(0, stage.steps - state.step)
    with progress(stage.title, left, unit="steps", enabled=run.groups.is_main, announce=True) as bar:
        for step in range(state.step + 1, stage.steps + 1):
            metrics = stage.step(step, state.policy_version)
            bar.advance()
            if stage.is_logged(step):
                bar.update(description=stage.headline(metrics))
            state = finish_step(run, stage, state.after_step(stage), metrics, saver)
    return state


def finish_step(
    run: Run, stage: Stage, state: RunState, metrics: Mapping[str, float], saver: Saver
) -> RunState:
    """Evaluate, log, ring alarms and save when due, or when told to end: Stopped then. Returns the state with what was
    measured. Collective."""
    evaluation: dict[str, float] = {}
    if stage.is_evaluated(state.step):
        with run.clock.phase("evaluate"):
            evaluation = run.evaluation.evaluate(step=state.step)
    if stage.is_logged(state.step):
        run.log(state.global_step, {**metrics, **evaluation})
    with run.clock.phase("checkpoint"):
        saver.poll()
    score = evaluation.get("eval/accuracy")
    state = replace(state.with_parts_of(run, stage), after=evaluation or state.after, score=score)
    told = run.told_to_stop()
    if told or stage.is_saved(state.step):
        with run.clock.phase("checkpoint"):
            saver.save(state, stage.models, last=bool(told) or state.step == stage.steps)
    if told:
        raise _stopped(run, told, state, saved=True)
    return state


def _begin_stage(run: Run, stage: Stage, plan: StagePlan, state: RunState, saver: Saver) -> RunState:
    """Enter a stage: where it samples, its start is synced, evaluated and saved. Collective."""
    state = replace(state, stage=stage.name, step=0, global_step=plan.first)
    if not stage.syncs_engine:
        return state
    _sync(run, state)
    with run.clock.phase("evaluate"):
        before = run.evaluation.evaluate(step=0)
    run.clock.take_step()
    if run.groups.is_main:
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.3g}" for name, value in before.items())
        print_status(f"Before {stage.title}: {shown}")
    score = before.get("eval/accuracy")
    state = replace(state.with_parts_of(run, stage), before=before, after=before, score=score)
    with run.clock.phase("checkpoint"):
        saver.save(state, stage.models)
        saver.finish()  # a run that is killed in its first step has something to go on from
    return state


def _stopped(run: Run, number: int, state: RunState, *, saved: bool) -> Stopped:
    what = "there is nothing to save yet"
    if saved:
        what = "its checkpoint is saved, and the same command goes on from it"
    message = f"stopped by {name_of(number)} after step {state.global_step} of {run.plan.total_steps}: {what}"
    return Stopped(number, message, silent=not run.groups.is_main)


def _exit_code(error: BaseException | None) -> int:
    """Return what the process ends with."""
    if error is None:
        return 0
    if isinstance(error, Stopped):
        return error.exit_code
    return EXIT_USER_ERROR if isinstance(error, UserError) else 1


def _sync(run: Run, state: RunState) -> None:
    tensors = iter_hf_tensors(run.name_map)
    sync_weights(run.engine_handle, tensors, run.groups, version=state.policy_version)


def _describe(run: Run) -> str:
    learned = run.demonstrations
    return describe_plan(
        run.plan,
        platform=run.policy.platform.kind,
        data=run.prompts.summary(),
        demonstrations=f" from {learned.settings.path} ({learned.tally.summary()})" if learned else "",
    )


def _resume_at(run: Run, stage: Stage, found: FoundCheckpoint | None) -> int | None:
    """The step of the whole run at which its metrics go on; None = there must be none yet."""
    if found:
        return found.state.global_step + 1
    logged = max((step for step, _ in read_metrics(run.plan.folder / METRICS_FILE)), default=0)
    until = (
        0 if stage.syncs_engine else stage.steps
    )  # its first checkpoint comes before its first step, or after these
    return 0 if run.plan.config.checkpoint.resume and logged <= until else None


def _open_files(run: Run, stage: Stage, found: FoundCheckpoint | None) -> None:
    """Open the metrics and write what this run is, once it is known that it can be. On the main rank."""
    plan, config = run.plan, run.plan.config
    run.logger = open_logger(
        plan.folder,
        config.log,
        resume_at=_resume_at(run, stage, found),
        total_steps=plan.total_steps,
        run_name=config.name,
        run_config=config.model_dump(mode="json"),
    )
    write_atomic(plan.folder / "config.yaml", to_yaml(config))
