"""Checkpoints of a run: written whole or not at all, in this process or behind the training, kept within bounds.

A checkpoint is written under another name. When every rank has written its files, all ranks together complete it, and
the main rank gives it its name and prunes older ones. Killed before that, a run goes on from the checkpoint before.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megarl.config.schema import Checkpoint
from megarl.errors import UserError
from megarl.megatron.checkpoint import begin_checkpoint, begin_weights
from megarl.megatron.groups import Groups
from megarl.megatron.policy import Policy
from megarl.megatron.writing import CheckpointFailed, CheckpointWrite
from megarl.monitor.status import print_status
from megarl.training.stages.stage import AuxiliaryModels
from megarl.training.state import (
    CRITIC,
    MANIFEST,
    REFERENCE,
    STATE,
    WRITING,
    RunState,
    fingerprint,
    finished_checkpoints,
    step_of,
)


@dataclass
class PendingCheckpoint:
    """A checkpoint on its way: from `scratch`, by these parts, to `final`. state: the text of state.json.

    entries: fingerprints of the files that this rank has written; problem: (errno, text) of reading them again.
    """

    scratch: Path
    final: Path
    state: str
    parts: list[CheckpointWrite] = field(default_factory=list)
    entries: dict[str, list[int]] = field(default_factory=dict)
    problem: tuple[int, str] | None = None

    def write(self) -> None:
        """This rank's files and their fingerprints; needs no other rank. Disk errors are raised by `complete`."""
        for part in self.parts:
            part.write()
        try:
            for path in (path for part in self.parts for path in part.written()):
                self.entries[str(path.relative_to(self.scratch))] = fingerprint(path)
        except OSError as error:
            self.problem = _told(error)

    def complete(self, groups: Groups, keep: int) -> None:
        """When every rank has written: complete, name, prune. Collective. Raises CheckpointFailed on every rank."""
        for part in self.parts:
            part.finish()
        everyone = groups.gather_from_everyone((self.entries, self.problem))
        problem = next((problem for _, problem in everyone if problem), None)
        if groups.is_main and problem is None:
            try:
                self._name({name: entry for entries, _ in everyone for name, entry in entries.items()})
                _prune(self.final, keep)
            except OSError as error:
                problem = _told(error)
        if (problem := groups.share_from_main(problem)) is not None:
            raise CheckpointFailed(*problem)

    def _name(self, entries: dict[str, list[int]]) -> None:
        """Manifest of all files, those of the main rank's completion included; then the final name."""
        (self.scratch / STATE).write_text(self.state)
        for path in self.scratch.rglob("*"):
            name = str(path.relative_to(self.scratch))
            if path.is_file() and name not in entries:
                entries[name] = fingerprint(path)
        (self.scratch / MANIFEST).write_text(json.dumps(entries, indent=1, sort_keys=True))
        old = self.final.with_name(f"{self.final.name}.old{WRITING}")
        shutil.rmtree(old, ignore_errors=True)
        if self.final.exists():  # of another stage, or damaged: never without one of the name for long
            os.replace(self.final, old)
        os.replace(self.scratch, self.final)
        shutil.rmtree(old, ignore_errors=True)


class Saver:
    """Writes a run's checkpoints.

    Behind the training, a checkpoint is copied to the host and written by a thread while steps go on; at most one is on
    its way. Whatever needs other ranks happens in `save`, `poll` and `finish`, which all ranks call at the same steps.
    """

    def __init__(self, policy: Policy, folder: Path, settings: Checkpoint) -> None:
        self._groups, self._policy = policy.groups, policy
        self._folder, self._keep = folder, settings.keep
        mode = settings.asynchronous
        self._behind = mode == "on" or (mode == "auto" and policy.platform.kind == "cuda")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._on_its_way: tuple[PendingCheckpoint, Future[None]] | None = None

    def save(self, state: RunState, models: AuxiliaryModels, *, last: bool = False) -> None:
        """Save the run as it is now, after the checkpoint on its way is complete. Collective. models: beside the
        policy.

        Raises UserError, on every rank, where a weight is not finite: nothing is written then, and nothing pruned.
        Where the disk refuses, the run goes on, everything saved before is untouched, and a warning says so. `last`:
        wait for it to be written, and then it is a UserError instead, since there is no later attempt.
        """
        self.finish()
        behind = self._behind and not last
        final = self._folder / f"step_{state.global_step:06d}"
        learned = [self._policy, *([models.critic] if models.critic is not None else [])]
        if not self._groups.everyone(all(model.weights_are_finite() for model in learned)):
            raise UserError(
                f"{final}: not written, since weights are not finite (NaN or infinity): no later step could mend them. "
                "Earlier checkpoints are untouched; lower the learning rate and start the same command again"
            )
        text = json.dumps(asdict(state), indent=1, sort_keys=True)
        checkpoint = PendingCheckpoint(final.with_name(final.name + WRITING), final, text)
        try:
            self._begin(checkpoint, models, copied=behind)
        except CheckpointFailed as error:
            self._give_up(checkpoint, error, last=last)
            return
        if behind:
            self._on_its_way = checkpoint, self._thread.submit(checkpoint.write)
        else:
            checkpoint.write()
            self._complete(checkpoint, last=last)

    def poll(self) -> None:
        """Complete the checkpoint on its way if every rank has written it. Collective; never waits for a disk."""
        if self._on_its_way and self._groups.everyone(self._on_its_way[1].done()):
            self.finish()

    def finish(self) -> None:
        """Complete the checkpoint on its way, if there is one. Collective."""
        if self._on_its_way:
            (checkpoint, written), self._on_its_way = self._on_its_way, None
            written.result()
            self._complete(checkpoint, last=False)

    def close(self) -> None:
        """Wait for this rank's files, without the other ranks: what is not complete by now is passed over later."""
        self._thread.shutdown()

    def _begin(self, checkpoint: PendingCheckpoint, models: AuxiliaryModels, *, copied: bool) -> None:
        policy, scratch, parts = self._policy, checkpoint.scratch, checkpoint.parts
        _make(self._groups, scratch)
        parts.append(begin_checkpoint(scratch, policy, copied=copied))
        if models.reference is not None:
            _make(self._groups, scratch / REFERENCE)
            with models.reference.in_place():  # the policy is back before anything is written
                parts.append(begin_weights(scratch / REFERENCE, policy.chunks, copied=True))
        if models.critic is not None:
            _make(self._groups, scratch / CRITIC)
            parts.append(begin_checkpoint(scratch / CRITIC, models.critic, copied=copied))

    def _complete(self, checkpoint: PendingCheckpoint, *, last: bool) -> None:
        try:
            checkpoint.complete(self._groups, self._keep)
        except CheckpointFailed as error:
            self._give_up(checkpoint, error, last=last)

    def _give_up(self, checkpoint: PendingCheckpoint, error: CheckpointFailed, *, last: bool) -> None:
        """Tell of it; collective, since every rank has met it."""
        final, is_main = checkpoint.final, self._groups.is_main
        if is_main:
            shutil.rmtree(checkpoint.scratch, ignore_errors=True)
        message = f"{final}: the checkpoint could not be written ({error.strerror}); earlier checkpoints are untouched"
        if last:
            raise UserError(f"{message}. Make room and start the same command again") from error
        if is_main:
            print_status(f"warning: {message}; the next one is tried in time")


def _make(groups: Groups, folder: Path) -> None:
    """An empty folder, there for every rank. Collective."""
    problem = None
    if groups.is_main:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            problem = _told(error)
    if (problem := groups.share_from_main(problem)) is not None:
        raise CheckpointFailed(*problem)


def _told(error: OSError) -> tuple[int, str]:
    return error.errno or 0, error.strerror or str(error)


def _prune(last: Path, keep: int) -> None:
    """Keep the newest ones up to `last`, which was just written, and the best. What bears a later step was passed over
    when the run was resumed, and is no longer what comes after."""
    found = finished_checkpoints(last.parent)
    held = [path for path in found if step_of(path) <= step_of(last)]
    scores = {path: score for path in held if (score := _score(path)) is not None}
    kept = set(held[-keep:])
    if scores:
        kept.add(max(scores, key=lambda path: (scores[path], step_of(path))))
    for path in set(found) - kept:
        shutil.rmtree(path, ignore_errors=True)


def _score(path: Path) -> float | None:
    try:
        return json.loads((path / STATE).read_text())["score"]  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError):
        return None
