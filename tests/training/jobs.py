"""Jobs that the training tests run on several ranks: runs opened by hand, stepped and saved as told."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.load import load_config
from megarl.training.run import Run, open_run, optimizer_of
from megarl.training.saving import Saver
from megarl.training.sft import sft_step
from megarl.training.state import RunState, finished_checkpoints, folder_of, resume
from megarl.weights.exchange import stream
from tests.training.conftest import ROOT, TINY


def open_tiny(folder: Path, *words: str) -> Run:
    """A run of the tiny configuration below `folder`, in its first stage."""
    file = folder / f"tiny_{os.environ['RANK']}.yaml"
    file.write_text(TINY.format(root=ROOT))
    return open_run(load_config(file, [f"folder={folder}/run", *words]))


def set_optimizer(run: Run, stage: str) -> None:
    run.trainer.set_optimizer(optimizer_of(run.config.sft.optimizer, 20))


def train(run: Run, steps: int) -> None:
    for _ in range(steps):
        sft_step(run, [run.demonstrations.sequence(prompt) for prompt in run.stream.next(4)])


def state_of(run: Run, step: int) -> RunState:
    return RunState("sft", step, run.stream.state_dict(), run.config.model.model_dump(mode="json"))


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """Of the policy, and of the reference and the critic where there are some."""
    found = {name: tensor.clone() for name, tensor in stream(run.name_map)}
    if run.extras.reference is not None:
        with run.extras.reference.in_place():
            found |= {f"reference/{name}": tensor.clone() for name, tensor in stream(run.name_map)}
    if run.extras.critic is not None:
        for chunk in run.extras.critic.chunks:
            found |= {f"critic/{name}": tensor.detach().clone() for name, tensor in chunk.named_parameters()}
    return found


def checkpoints_of(run: Run) -> list[str]:
    return [path.name for path in finished_checkpoints(folder_of(run))]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@contextmanager
def slow_disk(saver: Saver) -> Iterator[None]:
    """No file of a later checkpoint is written before the end."""
    gate = threading.Event()
    saver._thread.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def behind_job(folder: Path) -> dict[str, Any]:
    """Saved after two steps; two more steps while nothing is written yet; then written."""
    run = open_tiny(folder, "checkpoint.asynchronous=on")
    set_optimizer(run, "sft")
    saver = Saver(run)
    train(run, 2)
    saved = weights_of(run)
    with slow_disk(saver):
        saver.save(state_of(run, 2))
        train(run, 2)
        saver.look()
        unfinished = checkpoints_of(run)
    trained = weights_of(run)
    while not checkpoints_of(run):
        saver.look()
    saver.close()
    run.close()
    return {"saved": saved, "trained": trained, "unfinished": unfinished, "kept": checkpoints_of(run)}


def extras_job(folder: Path, asynchronous: str, algorithm: str) -> dict[str, Any]:
    """Policy, reference and critic, all different, change after they are saved."""
    run = open_tiny(folder, f"checkpoint.asynchronous={asynchronous}", algorithm)
    set_optimizer(run, "rl")
    run.make_extras()
    saver = Saver(run)

    def change() -> None:
        train(run, 1)
        for chunk in run.extras.critic.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(0.5)

    change()
    saved = weights_of(run)
    with slow_disk(saver) if asynchronous == "on" else contextlib.nullcontext():
        saver.save(replace(state_of(run, 1), stage="rl"))
        untouched = weights_of(run)
        change()
        run.extras.reference.replace()
    saver.finish()
    changed = weights_of(run)
    saver.close()
    run.close()
    return {"saved": saved, "untouched": untouched, "changed": changed}


def resume_job(
    folder: Path, steps: int, algorithm: str = "algorithm=gspo", model: str | None = None
) -> dict[str, Any]:
    """Resumed, perhaps with another setting of the model, and so many steps from there; weights before and after."""
    run = open_tiny(folder, algorithm, *([model] if model else []))
    state = resume(run, lambda stage: set_optimizer(run, stage))
    assert state is not None
    loaded = weights_of(run)
    train(run, steps)
    run.close()
    return {"step": state.step, "loaded": loaded, "trained": weights_of(run)}


@contextmanager
def full_disk() -> Iterator[None]:
    """This process can't write a file of more than 4 KB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing_disk_job(folder: Path, asynchronous: str) -> dict[str, Any]:
    """Three checkpoints, the second of which one rank can't write. What is told, and what is there after each."""
    run = open_tiny(folder, f"checkpoint.asynchronous={asynchronous}")
    set_optimizer(run, "sft")
    saver, told, kept = Saver(run), io.StringIO(), []
    for step in (1, 2, 3):
        refused = full_disk() if step == 2 and run.groups.rank == 1 else contextlib.nullcontext()
        train(run, 1)
        with contextlib.redirect_stderr(told), refused:
            saver.save(state_of(run, step))
            train(run, 1)
            saver.finish()
        kept.append(sorted(path.name for path in folder_of(run).iterdir()))
    saver.close()
    run.close()
    return {"told": told.getvalue().replace(str(folder), ""), "kept": kept}


def killed_job(folder: Path) -> None:
    """One checkpoint is complete, the next half written, when the ranks are killed."""
    run = open_tiny(folder, "checkpoint.asynchronous=on")
    set_optimizer(run, "sft")
    saver = Saver(run)
    train(run, 1)
    saver.save(state_of(run, 1))
    saver.finish()
    train(run, 1)
    with slow_disk(saver):
        saver.save(state_of(run, 2))
        train(run, 1)
        run.groups.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
