"""Where a run stands, and how it goes on from there.

`checkpoints/step_000020/` holds megatron-core's distributed checkpoint, `state.json` (where the run stands) and
`manifest.json` (size and checksum of every other file). What bears such a name was written whole (`saving.py`); what
was damaged since is recognised by the manifest and passed over.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.megatron.checkpoint import load_checkpoint, load_weights
from megarl.monitor.tell import tell
from megarl.training.run import Run, identity_of

MANIFEST, STATE, WRITING = "manifest.json", "state.json", ".writing"
HOW_IT_RUNS = {"recompute", "float32_lm_head", "load_balancing", "load_balancing_rate"}  # free to change
REFERENCE, CRITIC = "reference", "critic"


@dataclass(frozen=True)
class RunState:
    """Where a run stands, beside its tensors.

    stage: "sft" | "rl"; step: steps of that stage that are done; stream: the prompt stream's state; before, after:
    the evaluations that the final table shows; seconds: time by phase; score: what "best" compares (held-out
    accuracy), None where it was not evaluated; model: the config's model part; alarms: how long each has held;
    demonstrations: what the cold start learns from.
    """

    stage: str
    step: int
    stream: Mapping[str, Any]
    model: Mapping[str, Any]
    alarms: Mapping[str, int] = field(default_factory=dict)
    demonstrations: str = ""
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None


def folder_of(run: Run) -> Path:
    """Where a run's checkpoints lie."""
    return run.folder / "checkpoints"


def finished_checkpoints(folder: Path) -> list[Path]:
    """Those that bear a checkpoint's name, oldest first."""
    return [path for path in sorted(folder.glob("step_*")) if not path.name.endswith(WRITING)]


def fingerprint(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def resume(run: Run, set_optimizer: Callable[[str], None]) -> RunState | None:
    """Load the newest good checkpoint of the run folder: tensors into the trainer, state returned. Collective.

    None when there is none. Damaged ones are named and passed over. set_optimizer: gives the trainer the optimizer of
    a stage, before its moments are read. Raises UserError when the checkpoint is of another model, cold start or data.
    """
    for path in _candidates(run):
        if (problem := _damage(run, path)) is None:
            state = RunState(**json.loads((path / STATE).read_text()))
            _same_start(run, state, path)
            set_optimizer(state.stage)
            load_checkpoint(path, run.policy)
            if state.stage == "rl":
                _load_extras(run, path)
            run.stream.load_state_dict(state.stream)
            run.watch.restore(state.alarms)
            run.clock.total.update(state.seconds)
            if run.groups.is_main:
                tell(f"Resuming from {path}")
            return state
        if run.groups.is_main:
            tell(f"warning: {path} is damaged ({problem}); using the checkpoint before it")
    return None


def _load_extras(run: Run, path: Path) -> None:
    """The reference and the critic that the algorithm needs. Raises UserError for a checkpoint that lacks them."""
    run.make_extras()
    for needed, name in ((run.extras.reference, REFERENCE), (run.extras.critic, CRITIC)):
        if needed is not None and not (path / name).is_dir():
            raise UserError(
                f"{path}: saved by an algorithm without a {name}, which {run.recipe.name!r} needs: start a new run "
                "from its Hugging Face checkpoint, or go on with the algorithm it was saved with"
            )
    if run.extras.reference is not None:
        with run.extras.reference.in_place():
            load_weights(path / REFERENCE, run.policy.chunks)
    if run.extras.critic is not None:
        load_checkpoint(path / CRITIC, run.extras.critic)


def _candidates(run: Run) -> list[Path]:
    return run.groups.share_from_main(finished_checkpoints(folder_of(run))[::-1])


def _damage(run: Run, path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Collective."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        manifest, problem = None, f"{MANIFEST} cannot be read: {error}"
    if (manifest := run.groups.share_from_main(manifest)) is None:
        return run.groups.share_from_main(problem if run.groups.is_main else None)
    mine = list(_damaged_files(path, sorted(manifest.items())[run.groups.rank :: run.groups.world_size]))
    return next((p for part in run.groups.gather_from_everyone(mine) for p in part), None)


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


def _same_start(run: Run, state: RunState, path: Path) -> None:
    then, now = dict(state.model), run.config.model.model_dump(mode="json")
    computed = run.policy.architecture.transformer  # what else model.transformer says is how the model runs
    for part in (then, now):
        part["transformer"] = {k: v for k, v in (part.get("transformer") or {}).items() if k in computed}
    for key in now:
        if key in then and key not in HOW_IT_RUNS and then[key] != now[key]:
            raise UserError(
                f"{path}: saved with model.{key}={then[key]!r}, the config says {now[key]!r}: restore it, "
                "or start a new run with another name"
            )
    cold = int(path.name.removeprefix("step_")) - state.step
    if state.stage == "rl" and cold != run.config.sft.steps:
        raise UserError(
            f"{path}: saved after a cold start of {cold} steps, the config says sft.steps={run.config.sft.steps}: "
            "restore it, or start a new run with another name"
        )
    demonstrations = identity_of(run.demonstrations)
    if state.stage == "sft" and state.demonstrations != demonstrations:
        raise UserError(
            f"{path}: its cold start learned from other demonstrations ({state.demonstrations}) than those of now "
            f"({demonstrations}): restore them, or start a new run with another name"
        )
