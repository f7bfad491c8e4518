"""A run from beginning to end: open, resume, cold start, reinforcement learning, export, summary."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megarl.config.load import to_yaml
from megarl.config.schema import Config
from megarl.errors import UserError
from megarl.megatron.groups import finish, told_once
from megarl.monitor.alarms import AlarmStop
from megarl.monitor.files import write_atomic
from megarl.monitor.jsonl import read_metrics
from megarl.monitor.logger import METRICS_FILE, open_logger
from megarl.monitor.progress import progress
from megarl.monitor.report import RunSummary, print_summary
from megarl.monitor.tell import tell
from megarl.training.engines import sync
from megarl.training.evaluation import evaluate
from megarl.training.plan import plan_text
from megarl.training.rl import run_rl
from megarl.training.run import Run, on_main, open_run
from megarl.training.saving import Saver
from megarl.training.sft import run_sft
from megarl.training.state import RunState, resume
from megarl.weights.checkpoint_files import write_checkpoint
from megarl.weights.exchange import stream


def train(config: Config) -> None:
    """Run it on this rank; all ranks call it. Raises UserError for what the user can mend."""
    with told_once():
        run = open_run(config)
        saver = Saver(run)
        try:
            _Training(run, saver).run_all()
        except AlarmStop:  # every rank raises it at the same step
            saver.finish()
            raise
        finally:
            saver.close()
            run.close()
    finish()


def _last_logged(file: Path) -> int:
    return max((step for step, _ in read_metrics(file)), default=0)


class _Training:
    """The stages of one run, and where it stands."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self.run, self.saver = run, saver
        model = run.config.model.model_dump(mode="json")
        self.state = RunState(
            "sft", 0, run.stream.state_dict(), model, demonstrations=run.demonstrations.identity
        )

    def run_all(self) -> None:
        run, config = self.run, self.run.config
        if run.groups.is_main:
            tell(plan_text(run))
        resumed = resume(run, self._set_optimizer) if config.checkpoint.resume else None
        if resumed:
            self.state = resumed
        else:
            self._set_optimizer("sft")
        on_main(run.groups, lambda: self._open_files(resumed))
        if self.state.stage == "sft":
            run_sft(run, first_step=self.state.step + 1, after_step=self._after_sft)
            self._begin_rl()
        else:
            sync(run.seat, run.name_map, run.groups, version=self.state.step)
        run_rl(run, first_step=self.state.step + 1, after_step=self._after_rl)
        self.saver.finish()
        results = {"run folder": run.folder}
        if config.checkpoint.export_hf:
            results["Hugging Face checkpoint"] = self._export()
        if run.groups.is_main:
            print_summary(
                RunSummary(
                    f"Run {config.name!r}: {run.recipe.name}, {config.rl.steps} steps",
                    self.state.before,
                    self.state.after,
                    dict(run.clock.total),
                    results,
                )
            )

    def _open_files(self, resumed: RunState | None) -> None:
        """The main rank's: metrics, and what this run is, once it is known that it can be."""
        run, config = self.run, self.run.config
        resume_at = None
        if resumed:
            resume_at = self.state.step + (config.sft.steps if self.state.stage == "rl" else 0) + 1
        elif config.checkpoint.resume and _last_logged(run.folder / METRICS_FILE) <= config.sft.steps:
            resume_at = 0  # killed in its cold start, before its first checkpoint: it begins again
        run.logger = open_logger(
            run.folder,
            config.log,
            resume_at=resume_at,
            total_steps=config.sft.steps + config.rl.steps,
            run_name=config.name,
            run_config=config.model_dump(mode="json"),
        )
        write_atomic(run.folder / "config.yaml", to_yaml(config))

    def _set_optimizer(self, stage: str) -> None:
        config = self.run.config
        if stage == "sft":
            section, steps = config.sft.optimizer, config.sft.steps
        else:
            section, steps = config.rl.optimizer, config.rl.steps * self.run.minibatches
        self.run.policy.set_optimizer(section, steps)

    def _note(self, stage: str, step: int, **changes) -> None:  # type: ignore[no-untyped-def]
        self.state = replace(
            self.state,
            stage=stage,
            step=step,
            stream=self.run.stream.state_dict(),
            alarms=self.run.watch.state(),
            seconds=dict(self.run.clock.total),
            **{"score": None, **changes},
        )

    def _save(self, *, last: bool = False) -> None:
        with self.run.clock.phase("checkpoint"):
            self.saver.save(self.state, last=last)

    def _look_after_saving(self) -> None:
        with self.run.clock.phase("checkpoint"):
            self.saver.look()

    def _after_sft(self, step: int) -> None:
        self._look_after_saving()
        every = self.run.config.checkpoint.sft_every
        if every and step % every == 0 and step < self.run.config.sft.steps:
            self._note("sft", step)
            self._save()

    def _begin_rl(self) -> None:
        """The policy that RL starts from: synced, evaluated, saved."""
        run = self.run
        self._set_optimizer("rl")
        run.make_extras()
        sync(run.seat, run.name_map, run.groups, version=0)
        with run.clock.phase("evaluate"):
            before = evaluate(run, step=0)
        run.clock.take_step()
        if run.groups.is_main:
            shown = ", ".join(f"{name.removeprefix('eval/')} {value:.3g}" for name, value in before.items())
            tell(f"Before RL: {shown}")
        self._note("rl", 0, before=before, after=before, score=before.get("eval/accuracy"))
        self._save()

    def _after_rl(self, step: int, evaluation: Mapping[str, float]) -> None:
        self._look_after_saving()
        config = self.run.config
        self._note("rl", step, after=evaluation or self.state.after, score=evaluation.get("eval/accuracy"))
        last, every = step == config.rl.steps, config.checkpoint.every
        if last or (every and step % every == 0):
            self._save(last=last)

    def _export(self) -> Path:
        """An HF checkpoint of the final policy. Collective; the main rank writes."""
        run = self.run
        target = run.folder / "hf"
        problem = None
        with progress("Writing the Hugging Face checkpoint", enabled=run.groups.is_main, announce=True):
            tensors = stream(run.name_map)
            if run.groups.is_main:
                try:
                    dtype = run.policy.config.params_dtype
                    write_checkpoint(
                        target, tensors, config=run.hf_config, assets=run.tokenizer.folder, dtype=dtype
                    )
                    stops = run.start_folder / "generation_config.json"
                    if stops.is_file() and not (target / stops.name).exists():  # a tokenizer from elsewhere
                        shutil.copyfile(stops, target / stops.name)
                    if config_template := run.config.model.chat_template:
                        shutil.copyfile(config_template, target / "chat_template.jinja")
                except OSError as error:
                    problem = (
                        f"{target}: cannot be written ({error.strerror}); the run's checkpoints are whole"
                    )
            for _ in tensors:  # the other ranks' part of every gather, and what a failed write left
                pass
        if (problem := run.groups.share_from_main(problem)) is not None:
            raise UserError(problem)
        return target
