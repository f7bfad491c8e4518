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
from megarl.records import Batch, Group
from megarl.rollout.filters import WrongWeights
from megarl.rollout.sync import SyncFailed
from megarl.routing.store import RouteStore
from megarl.routing.trace import RoutingError
from megarl.training.minibatches import make_minibatches
from megarl.training.resolve import resolve
from megarl.training.run import Run, join_ranks, open_run
from megarl.training.saving import Saver
from megarl.training.scoring import audit, with_engine_routes
from megarl.training.stages.rl import RlStage
from megarl.training.stages.stage import Stage
from megarl.training.state import (
    RunState,
    checkpoints_folder,
    find_checkpoint,
    fingerprint,
    finished_checkpoints,
    load_found,
)
from megarl.weights.exchange import iter_hf_tensors
from tests.disk import full_disk
from tests.training.conftest import TINY


def open_tiny(folder: Path, *words: str) -> Run:
    """A run of the tiny configuration below `folder`."""
    file = folder / f"tiny_{os.environ['RANK']}.yaml"
    made = (above / "quickstart" / "quickstart.yaml" for above in folder.parents)
    file.write_text(TINY.format(quickstart=next(path for path in made if path.is_file())))
    config = load_config(file, [f"folder={folder}/run", *words])
    plan = resolve(config, int(os.environ["WORLD_SIZE"]))
    return open_run(plan, *join_ranks(plan), plan.stages)


def opened(run: Run, name: str) -> Stage:
    """A stage of the run, whose optimizer is the cold start's in all of them."""
    (plan,) = (stage for stage in run.plan.stages if stage.name == name)
    return plan.settings.open(run, plan)


def prepared(run: Run, name: str) -> Any:
    stage = opened(run, name)
    stage.prepare()
    return stage


def train(run: Run, stage: Stage, first: int, steps: int = 1) -> None:
    """Steps of the cold start from number `first` on, whichever stage the run is in."""
    learner = stage if stage.name == "sft" else opened(run, "sft")
    for step in range(first, first + steps):
        learner.step(step, 0)


def state_of(run: Run, stage: Stage, step: int) -> RunState:
    before = {plan.name: plan.first for plan in run.plan.stages}[stage.name]
    start = replace(RunState.at_start(run.plan), stage=stage.name, step=step, global_step=before + step)
    return start.with_parts_of(run, stage)


def weights_of(run: Run, stage: Stage) -> dict[str, torch.Tensor]:
    """Of the policy, and of the reference and the critic where there are some."""
    found = {name: tensor.clone() for name, tensor in iter_hf_tensors(run.name_map)}
    if stage.models.reference is not None:
        with stage.models.reference.in_place():
            found |= {f"reference/{name}": tensor.clone() for name, tensor in iter_hf_tensors(run.name_map)}
    if stage.models.critic is not None:
        for chunk in stage.models.critic.chunks:
            found |= {f"critic/{name}": tensor.detach().clone() for name, tensor in chunk.named_parameters()}
    return found


def saver_of(run: Run) -> Saver:
    return Saver(run.policy, checkpoints_folder(run.plan.folder), run.plan.config.checkpoint)


def checkpoints_of(run: Run) -> list[str]:
    return [path.name for path in finished_checkpoints(checkpoints_folder(run.plan.folder))]


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
    stage, saver = prepared(run, "sft"), saver_of(run)
    train(run, stage, 1, 2)
    saved = weights_of(run, stage)
    with slow_disk(saver):
        saver.save(state_of(run, stage, 2), stage.models)
        train(run, stage, 3, 2)
        saver.poll()
        unfinished = checkpoints_of(run)
    trained = weights_of(run, stage)
    while not checkpoints_of(run):
        saver.poll()
    saver.close()
    run.close()
    return {"saved": saved, "trained": trained, "unfinished": unfinished, "kept": checkpoints_of(run)}


def extras_job(folder: Path, asynchronous: str, algorithm: str) -> dict[str, Any]:
    """Policy, reference and critic, all different, change after they are saved."""
    run = open_tiny(folder, f"checkpoint.asynchronous={asynchronous}", algorithm)
    stage, saver = prepared(run, "rl"), saver_of(run)

    def change() -> None:
        train(run, stage, 1)
        for chunk in stage.models.critic.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(0.5)

    change()
    saved = weights_of(run, stage)
    with slow_disk(saver) if asynchronous == "on" else contextlib.nullcontext():
        saver.save(state_of(run, stage, 1), stage.models)
        untouched = weights_of(run, stage)
        change()
        stage.models.reference.replace()
    saver.finish()
    changed = weights_of(run, stage)
    saver.close()
    run.close()
    return {"saved": saved, "untouched": untouched, "changed": changed}


def resume_job(
    folder: Path, steps: int, algorithm: str = "algorithm=gspo", model: str | None = None
) -> dict[str, Any]:
    """Resumed, perhaps with another setting of the model, and so many steps from there; weights before and after."""
    run = open_tiny(folder, algorithm, *([model] if model else []))
    found = find_checkpoint(run.plan, run.groups)
    assert found is not None
    stage = opened(run, found.state.stage)
    load_found(run, stage, found)
    loaded = weights_of(run, stage)
    train(run, stage, found.state.step + 1, steps)
    run.close()
    return {"step": found.state.step, "loaded": loaded, "trained": weights_of(run, stage)}


def demonstrations_job(folder: Path, response: str) -> str:
    """A cold start from a file of this one response, resumed or begun. What is told."""
    file = folder / f"demonstrations_{os.environ['RANK']}.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 1 =", "response": response}))
    run = open_tiny(folder, f"sft.demonstrations={{path: {file}, preset: prompt_response}}")
    stage, saver = opened(run, "sft"), saver_of(run)
    try:
        if (found := find_checkpoint(run.plan, run.groups)) is not None:
            load_found(run, stage, found)
            return f"resumed at {found.state.step}"
        stage.prepare()
        saver.save(state_of(run, stage, 2), stage.models)
        return "begun"
    except UserError as error:
        return str(error)
    finally:
        saver.close()
        run.close()


def failing_disk_job(folder: Path, asynchronous: str) -> dict[str, Any]:
    """Three checkpoints, the second of which one rank can't write. What is told, and what is there after each."""
    run = open_tiny(folder, f"checkpoint.asynchronous={asynchronous}")
    stage, saver, told, kept = prepared(run, "sft"), saver_of(run), io.StringIO(), []
    for step in (1, 2, 3):
        refused = full_disk() if step == 2 and run.groups.rank == 1 else contextlib.nullcontext()
        train(run, stage, step)
        with contextlib.redirect_stderr(told), refused:
            saver.save(state_of(run, stage, step), stage.models)
            train(run, stage, step)
            saver.finish()
        kept.append(sorted(path.name for path in checkpoints_folder(run.plan.folder).iterdir()))
    saver.close()
    run.close()
    return {"told": told.getvalue().replace(str(folder), ""), "kept": kept}


def killed_job(folder: Path) -> None:
    """One checkpoint is complete, the next half written, when the ranks are killed."""
    run = open_tiny(folder, "checkpoint.asynchronous=on")
    stage, saver = prepared(run, "sft"), saver_of(run)
    train(run, stage, 1)
    saver.save(state_of(run, stage, 1), stage.models)
    saver.finish()
    train(run, stage, 1)
    with slow_disk(saver):
        saver.save(state_of(run, stage, 2), stage.models)
        train(run, stage, 1)
        run.groups.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def batches_of(stage: RlStage, groups: list[Group]) -> list[Batch]:
    settings = stage.source.settings
    budget, minibatches = settings.token_budget, settings.minibatches
    return make_minibatches(groups, minibatches, stage.policy, token_budget=budget, seed=0, step=1)


def left_out_job(folder: Path, algorithm: str) -> list[dict[str, Any]]:
    """Metrics of three updates on two replicas: one replica has nothing left, both have, and the first of two
    mini-batches has nothing to learn from."""
    run = open_tiny(folder, algorithm, "rl.sampling_rounds=1", "rl.optimizer={lr: 4.0e-3, min_lr: 0}")
    stage: RlStage = prepared(run, "rl")
    sampled = [
        replace(
            g, samples=tuple(replace(s, reward=float(n % 2)) for n, s in enumerate(g.samples)), dropped=None
        )
        for g in stage.source.sample(1)
    ]
    nothing = [replace(g, dropped="same_reward") for g in sampled]
    first = {s.sample_id for s in batches_of(stage, sampled)[0].samples}
    unscored = [
        replace(g, samples=tuple(replace(s, reward=None) if s.sample_id in first else s for s in g.samples))
        for g in sampled
    ]
    metrics = []
    for groups in (sampled if run.groups.is_main else nothing, nothing, unscored):
        made = batches_of(stage, groups)
        learned = stage.update.learn(stage.update.score(made))
        metrics.append(learned | {"made": sum(len(b.micro_batches) for b in made)})
    run.close()
    return metrics


def logged_job(folder: Path, *, learns: str) -> dict[str, dict[str, float]]:
    """Metrics of the held-out prompts and of two further sets, one of which has a name no metric could have; of a step
    of the cold start; and of one of reinforcement learning by this algorithm."""
    task = (
        "kind: reasoning_gym, task: chain_sum, size: 3, params: {min_terms: 2, max_terms: 2, max_digits: 1}"
    )
    sets = f"data.evaluations={{two sums: {{{task}, seed: 1}}, b: {{{task}, seed: 2}}}}"
    run = open_tiny(folder, sets, learns, "rl.audit_every=1")
    metrics = {"evaluation": run.evaluation.evaluate(step=0)}
    for name in ("sft", "rl"):
        metrics[name] = prepared(run, name).step(1, 0)
    run.close()
    return metrics


def distrust_job(folder: Path) -> dict[str, Any]:
    """What is told of an engine that returns no routes, of one that is a weight version behind, and of one that holds
    another bit than it was sent; and whether the policy was as before after each."""
    run = open_tiny(
        folder, "algorithm={name: grpo, kl: none, old_logprobs: recompute, routing_replay: engine}"
    )
    stage: RlStage = prepared(run, "rl")
    engine: Any = run.engine_handle.engine
    generate, update_weights = engine.generate, engine.update_weights
    before, told = weights_of(run, stage), {}

    def step(number: int) -> str:
        try:
            stage.step(number, number - 1)
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
    unchanged = same(before, weights_of(run, stage))
    engine.update_weights = with_another_bit
    told["another bit"] = step(1)
    run.close()
    return {"told": told, "unchanged": unchanged}


def other_routes_job(folder: Path, algorithm: str) -> dict[str, float]:
    """Metrics of an update without learning that replays other experts than the engine's, and of an audit after it."""
    frozen = "rl.optimizer={lr: 1e-20, min_lr: 0, warmup_steps: 0}"
    run = open_tiny(folder, algorithm, frozen, "rl.minibatches=1")
    stage: RlStage = prepared(run, "rl")
    sampled = stage.source.routes = RouteStore()
    store = RouteStore()
    groups = [
        replace(g, samples=tuple(replace(s, reward=float(n % 2)) for n, s in enumerate(g.samples)))
        for g in stage.source.sample(1)
    ]
    for name, (experts, stale) in sampled._kept.items():
        store.add(name, (experts + 1) % 8, stale)
    batches = with_engine_routes(batches_of(stage, groups), store, run.policy)
    metrics = stage.update.learn(stage.update.score(batches)) | audit(batches[0], run.policy, 1.0)
    run.close()
    return metrics


def other_format_job(folder: Path) -> str:
    """What is told of a checkpoint whose state was written by another version."""
    run = open_tiny(folder, "parallel.expert=1")
    path = checkpoints_folder(run.plan.folder) / "step_000001"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"stage": "rl", "step": 1}))
    (path / "manifest.json").write_text(json.dumps({"state.json": fingerprint(path / "state.json")}))
    try:
        find_checkpoint(run.plan, run.groups)
        return "nothing"
    except UserError as error:
        return str(error)
    finally:
        run.close()


class Spoiled:
    """An objective whose loss is NaN in the first micro-batches of this rank."""

    def __init__(self, objective: Any, micro_batches: int) -> None:
        self.objective, self.left = objective, micro_batches

    def loss(self, *arguments: Any, **options: Any) -> Any:
        output = self.objective.loss(*arguments, **options)
        self.left -= 1
        return output._replace(loss=output.loss * float("nan")) if self.left >= 0 else output


def not_finite_job(folder: Path) -> dict[str, Any]:
    """Metrics of a cold start whose second step is NaN on one of two ranks, and of three updates with a critic: good,
    the first mini-batch NaN there, and a critic's return NaN there. Then attempts to save while a weight of the critic
    or of the policy is NaN there: what is told, and which checkpoints there are."""
    words = ("sft.steps=3", "sft.optimizer.warmup_steps=2", "algorithm=ppo", "rl.minibatches=2")
    run = open_tiny(folder, *words, "checkpoint.keep=1")
    second = not run.groups.is_main
    cold: Any = prepared(run, "sft")
    objective, cold_start = cold.objective, []
    for step in (1, 2, 3):
        cold.objective = Spoiled(objective, 1 if second and step == 2 else 0)
        cold_start.append(cold.step(step, 0))
    rl: RlStage = prepared(run, "rl")
    groups = [
        replace(g, samples=tuple(replace(s, reward=float(n % 2)) for n, s in enumerate(g.samples)))
        for g in rl.source.sample(1)
    ]
    batches, updates, objective = batches_of(rl, groups), [], rl.update.objective
    for spoiled in ("nothing", "policy", "critic"):
        scored = rl.update.score(batches)
        if spoiled == "policy" and second:
            rl.update.objective = Spoiled(objective, len(scored[0].micro_batches))
        if spoiled == "critic" and second:
            first = scored[0].micro_batches
            returns = [m.columns["returns"] + float("nan") for m in first]
            spoilt = [m.with_columns(returns=r) for m, r in zip(first, returns, strict=True)]
            scored[0] = scored[0].with_micro_batches(spoilt)
        updates.append(rl.update.learn(scored))
        rl.update.objective = objective
    assert rl.models.critic is not None
    saver, told = saver_of(run), []
    saver.save(state_of(run, rl, 1), rl.models)
    for model in (rl.models.critic, run.policy):
        weight = next(model.chunks[-1].parameters()).data.view(-1)
        kept = weight[0].clone()
        weight[0] = float("nan") if second else kept
        try:
            saver.save(state_of(run, rl, 2), rl.models)
        except UserError as error:
            told.append(str(error))
        weight[0] = kept
    result = {"cold start": cold_start, "updates": updates, "told": told, "checkpoints": checkpoints_of(run)}
    saver.save(state_of(run, rl, 2), rl.models)
    result["saved"] = checkpoints_of(run)
    saver.close()
    run.close()
    return result
