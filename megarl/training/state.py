"""Where a run stands, and how it goes on from there.

`checkpoints/step_000020/` holds megatron-core's distributed checkpoint, `state.json` (where the run stands) and
`manifest.json` (size and checksum of every other file). What bears such a name was written whole (`saving.py`); what
was damaged since is recognised by the manifest and passed over.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.megatron.checkpoint import load_checkpoint, load_weights
from megarl.megatron.groups import Groups
from megarl.monitor.status import print_status
from megarl.training.resolve import Plan
from megarl.training.run import Run
from megarl.training.stages.stage import Stage
from megarl.weights.checkpoint_files import digest_of_folder

MANIFEST, STATE, WRITING = "manifest.json", "state.json", ".writing"
FORMAT = 3
HOW_IT_RUNS = {"recompute", "float32_lm_head", "load_balancing", "load_balancing_rate"}  # free to change
WHERE_IT_LIES = {"tokenizer", "chat_template"}  # free to move: what they hold is part of the data's identity
REFERENCE, CRITIC = "reference", "critic"


@dataclass(frozen=True)
class RunState:
    """Where a run stands, beside its tensors.

    stage, step: the stage's name, and how many of its steps are done. global_step: the whole run's steps that are done.
    policy_version: of the weights that the engine holds. model: the config's model part. source: where the stage's
    source of batches stands. alarms: how long each has held. before, after: the evaluations that the final table shows.
    seconds: time by phase. score: what "best" compares (held-out accuracy), None where it was not evaluated.
    began: when the run began, by its first rank's clock (ISO 8601): the date that a chat template writes, however long
    the run goes on. start: digest of the model folder that the run began from, which may be moved.
    """

    stage: str
    step: int
    global_step: int
    policy_version: int
    model: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=dict)
    alarms: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None
    began: str = field(default_factory=lambda: datetime.now().isoformat())
    start: str = ""
    format: int = FORMAT

    @classmethod
    def at_start(cls, plan: Plan) -> RunState:
        """The state before the first step of the first stage."""
        model = plan.config.model
        start = digest_of_folder(Path(str(model.path)))
        return cls(plan.stages[0].name, 0, 0, 0, model.model_dump(mode="json"), start=start)

    def after_step(self, stage: Stage) -> RunState:
        """The state when one more step of the stage is done."""
        return replace(
            self,
            step=self.step + 1,
            global_step=self.global_step + 1,
            policy_version=self.policy_version + stage.syncs_engine,
        )

    def with_parts_of(self, run: Run, stage: Stage) -> RunState:
        """The state with where the stage's source, the alarms and the clock stand now."""
        return replace(
            self,
            source=stage.source.state_dict(),
            alarms=run.watch.state(),
            seconds=dict(run.clock.total),
        )


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that is whole, and the state that it was saved in."""

    path: Path
    state: RunState


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run_folder / "checkpoints"


def finished_checkpoints(folder: Path) -> list[Path]:
    """Those that bear a checkpoint's name and nothing more, oldest first: not what is being written, nor what a user
    has set aside."""
    named = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name, re.ASCII))
    return sorted(named, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step_"))


def fingerprint(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def find_checkpoint(plan: Plan, groups: Groups) -> FoundCheckpoint | None:
    """Find the newest good checkpoint of the run folder; None when there is none. Collective.

    Damaged ones are named and passed over. Raises UserError when the checkpoint is of another model or other stages.
    """
    for path in _candidates(plan, groups):
        if (problem := _damage(groups, path)) is None:
            saved = json.loads((path / STATE).read_text())
            if saved.get("format") != FORMAT:
                raise UserError(
                    f"{path}: saved by another version of megarl: go on with that version, or start a new run with "
                    "another name"
                )
            state = RunState(**saved)
            _refuse_other_start(plan, state, path)
            return FoundCheckpoint(path, state)
        if groups.is_main:
            print_status(f"warning: {path} is damaged ({problem}); using the checkpoint before it")
    return None


def load_found(run: Run, stage: Stage, found: FoundCheckpoint) -> None:
    """Go on from a checkpoint: its tensors into the policy and the models beside it, its state into the stage's source,
    the alarms and the clock. Collective. Raises UserError for a checkpoint that lacks a model, and for other data."""
    path, state = found.path, found.state
    stage.prepare()
    load_checkpoint(path, run.policy)
    for needed, name in ((stage.models.reference, REFERENCE), (stage.models.critic, CRITIC)):
        if needed is not None and not (path / name).is_dir():
            raise UserError(
                f"{path}: saved by an algorithm without a {name}, which {run.plan.recipe.name!r} needs: start a new "
                "run from its Hugging Face checkpoint, or go on with the algorithm it was saved with"
            )
    if stage.models.reference is not None:
        with stage.models.reference.in_place():
            load_weights(path / REFERENCE, run.policy.chunks)
    if stage.models.critic is not None:
        load_checkpoint(path / CRITIC, stage.models.critic)
    try:
        stage.source.load_state_dict(state.source)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    run.watch.restore(state.alarms)
    run.clock.total.update(state.seconds)
    if run.groups.is_main:
        print_status(f"Resuming from {path}")


def _candidates(plan: Plan, groups: Groups) -> list[Path]:
    return groups.share_from_main(finished_checkpoints(checkpoints_folder(plan.folder))[::-1])


def _damage(groups: Groups, path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Collective."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        manifest, problem = None, f"{MANIFEST} cannot be read: {error}"
    if (manifest := groups.share_from_main(manifest)) is None:
        return groups.share_from_main(problem if groups.is_main else None)
    mine = list(_damaged_files(path, sorted(manifest.items())[groups.rank :: groups.world_size]))
    return next((p for part in groups.gather_from_everyone(mine) for p in part), None)


def _damaged_files(path: Path, entries: list[tuple[str, list[int]]]) -> Iterator[str]:
    for name, expected in entries:
        try:
            found = fingerprint(path / name)
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if found[0] != expected[0]:
            yield f"{name} has {found[0]} bytes instead of {expected[0]}"
        elif found != expected:
            yield f"{name} has other contents than were written"


def _refuse_other_start(plan: Plan, state: RunState, path: Path) -> None:
    """Raises UserError where a checkpoint is of another model, or of a run with other stages before it."""
    then, now = dict(state.model), plan.config.model.model_dump(mode="json")
    computed = plan.architecture.transformer  # what else model.transformer says is how the model runs
    for part in (then, now):
        part["transformer"] = {k: v for k, v in (part.get("transformer") or {}).items() if k in computed}
    folder = Path(str(now["path"]))
    moved = then["path"] != now["path"] and digest_of_folder(folder) == state.start
    free = HOW_IT_RUNS | WHERE_IT_LIES | ({"path"} if moved else set())
    for key in now:
        if key in then and key not in free and then[key] != now[key]:
            raise UserError(
                f"{path}: saved with model.{key}={then[key]!r}, the config says {now[key]!r}: restore it, "
                "or start a new run with another name"
            )
    first = {stage.name: stage.first for stage in plan.stages}
    if state.stage not in first:
        raise UserError(
            f"{path}: saved in the stage {state.stage!r}, which the config does not have now: restore it, or start a "
            "new run with another name"
        )
    if (before := state.global_step - state.step) != first[state.stage]:
        raise UserError(
            f"{path}: saved after a cold start of {before} steps, the config says sft.steps={first[state.stage]}: "
            "restore it, or start a new run with another name"
        )
