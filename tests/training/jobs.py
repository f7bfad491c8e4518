"""Jobs that the training tests run on several ranks: runs opened by hand, stepped and saved as told."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.load import load_config
from megarl.errors import UserError
from megarl.monitor.samples import SampleWriter
from megarl.records import Batch, Group
from megarl.rollout.staleness import WrongWeights
from megarl.routing.store import RouteStore
from megarl.routing.trace import RoutingError
from megarl.training.engines import SyncFailed
from megarl.training.evaluation import evaluate
from megarl.training.rl import rl_step, sample, update_settings
from megarl.training.run import Run, open_run
from megarl.training.saving import Saver
from megarl.training.sft import sft_step
from megarl.training.state import RunState, finished_checkpoints, folder_of, resume
from megarl.training.update import Updater, split
from megarl.weights.exchange import stream
from tests.disk import full_disk
from tests.training.conftest import ROOT, TINY


def open_tiny(folder: Path, *words: str) -> Run:
    """A run of the tiny configuration below `folder`, in its first stage."""
    file = folder / f"tiny_{os.environ['RANK']}.yaml"
    file.write_text(TINY.format(root=ROOT))
    return open_run(load_config(file, [f"folder={folder}/run", *words]))


def set_optimizer(run: Run, stage: str) -> None:
    run.policy.set_optimizer(run.config.sft.optimizer, 20)


def train(run: Run, steps: int) -> None:
    for _ in range(steps):
        sft_step(run, [run.demonstrations.sequence(prompt) for prompt in run.stream.next(4)])


def state_of(run: Run, step: int) -> RunState:
    model = run.config.model.model_dump(mode="json")
    return RunState("sft", step, run.stream.state_dict(), model, demonstrations=run.demonstrations.identity)


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


def demonstrations_job(folder: Path, response: str) -> str:
    """A cold start from a file of this one response, resumed or begun. What is told."""
    file = folder / f"demonstrations_{os.environ['RANK']}.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 1 =", "response": response}))
    run = open_tiny(folder, f"sft.demonstrations.file={{path: {file}, preset: prompt_response}}")
    saver = Saver(run)
    try:
        state = resume(run, lambda stage: set_optimizer(run, stage))
        if state is not None:
            return f"resumed at {state.step}"
        set_optimizer(run, "sft")
        saver.save(state_of(run, 2))
        return "begun"
    except UserError as error:
        return str(error)
    finally:
        saver.close()
        run.close()


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


def left_out_job(folder: Path, algorithm: str) -> list[dict[str, Any]]:
    """Metrics of three updates on two replicas: one replica has nothing left, both have, and the first of two
    mini-batches has nothing to learn from."""
    run = open_tiny(folder, algorithm, "rl.sampling_rounds=1")
    set_optimizer(run, "rl")
    run.make_extras()
    updater = Updater(
        run.policy, update_settings(run), reference=run.extras.reference, critic=run.extras.critic
    )
    sampled = [
        replace(
            g, samples=tuple(replace(s, reward=float(n % 2)) for n, s in enumerate(g.samples)), dropped=None
        )
        for g in sample(run, 1)
    ]
    nothing = [replace(g, dropped="same_reward") for g in sampled]

    def batches(groups: list[Group]) -> list[Batch]:
        return split(groups, updater.settings, run.policy, seed=0, step=1)

    first = {s.sample_id for s in batches(sampled)[0].samples}
    unscored = [
        replace(g, samples=tuple(replace(s, reward=None) if s.sample_id in first else s for s in g.samples))
        for g in sampled
    ]
    metrics = []
    for groups in (sampled if run.groups.is_main else nothing, nothing, unscored):
        made = batches(groups)
        metrics.append(updater.update(made) | {"made": sum(len(b.micro_batches) for b in made)})
    run.close()
    return metrics


def evaluation_job(folder: Path) -> dict[str, float]:
    """Of the held-out prompts and of two further sets, one of which has a name no metric could have."""
    task = (
        "kind: reasoning_gym, task: chain_sum, size: 3, params: {min_terms: 2, max_terms: 2, max_digits: 1}"
    )
    run = open_tiny(folder, f"data.evaluations={{two sums: {{{task}, seed: 1}}, b: {{{task}, seed: 2}}}}")
    metrics = evaluate(run, step=0)
    run.close()
    return metrics


def distrust_job(folder: Path) -> dict[str, Any]:
    """What is told of an engine that returns no routes, of one that is a weight version behind, and of one that holds
    another bit than it was sent; and whether the policy was as before after each."""
    run = open_tiny(
        folder, "algorithm={name: grpo, kl: none, old_logprobs: recompute, routing_replay: engine}"
    )
    set_optimizer(run, "rl")
    updater, writer = Updater(run.policy, update_settings(run)), SampleWriter(folder, every=0)
    engine: Any = run.seat.engine
    generate, update_weights = engine.generate, engine.update_weights
    before, told = weights_of(run), {}

    def step(number: int) -> str:
        try:
            rl_step(run, updater, writer, number)
        except (RoutingError, WrongWeights, SyncFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    async def without_routes(requests: Any) -> Any:
        async for result in generate(requests):
            yield replace(result, routes=None)

    def with_another_bit(tensors: Any, version: int) -> Any:
        sent = update_weights(tensors, version)
        engine._batch.model.weights["model.norm.weight"][0] += 1
        return sent

    engine.generate = without_routes
    told["no routes"] = step(1)
    engine.generate = generate
    told["behind"] = step(2)
    unchanged = same(before, weights_of(run))
    engine.update_weights = with_another_bit
    told["another bit"] = step(1)
    run.close()
    return {"told": told, "unchanged": unchanged}


def other_routes_job(folder: Path, algorithm: str) -> dict[str, float]:
    """Metrics of an update without learning that replays other experts than the engine's, and of an audit after it."""
    frozen = "sft.optimizer={lr: 1e-20, min_lr: 0, warmup_steps: 0}"
    run = open_tiny(folder, algorithm, frozen, "rl.minibatches=1")
    set_optimizer(run, "rl")
    run.make_extras()
    updater = Updater(run.policy, update_settings(run), reference=run.extras.reference)
    sampled, store = RouteStore(), RouteStore()
    groups = [
        replace(g, samples=tuple(replace(s, reward=float(n % 2)) for n, s in enumerate(g.samples)))
        for g in sample(run, 1, sampled)
    ]
    for name, (experts, stale) in sampled._kept.items():
        store.add(name, (experts + 1) % 8, stale)
    batches = split(groups, updater.settings, run.policy, seed=0, step=1)
    metrics = updater.update(batches, store) | updater.audit(batches[0])
    run.close()
    return metrics
