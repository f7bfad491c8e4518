"""Stage 2: reinforcement learning with verifiable rewards. One step, top to bottom, is `rl_step`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megarl.data.demonstrations import shows_work
from megarl.monitor.progress import progress
from megarl.monitor.samples import SampleWriter
from megarl.records import Batch, Group, Prompt
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import merge_counts, rollout_counts, sample_groups
from megarl.rollout.staleness import settle_staleness
from megarl.routing.store import RouteStore
from megarl.training.engines import sync
from megarl.training.evaluation import evaluate
from megarl.training.overlong import settle_overlong
from megarl.training.routes import share_groups
from megarl.training.run import Run, engine_of, on_main
from megarl.training.update import Updater, UpdateSettings, draw_audit, split


def update_settings(run: Run) -> UpdateSettings:
    config = run.config
    return UpdateSettings(
        recipe=run.recipe,
        sources=run.sources,
        minibatches=run.minibatches,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        micro_batch_tokens=config.batching.micro_batch_tokens,
    )


SAME_REWARD = "same_reward"


def sample(run: Run, step: int, store: RouteStore | None = None) -> list[Group]:
    """This replica's groups of a step: sampled and scored by its leader, shared with its ranks. store: where the
    engine's routes go; None = it is not asked for them.

    With dynamic sampling (DAPO, arXiv:2503.14476, Eq. 11) groups whose rewards are all equal are dropped and others
    sampled in their place, for up to `rl.sampling_rounds` rounds; the dropped ones are returned, too.
    """
    config, dynamic = run.config, run.recipe.dynamic_sampling
    groups = fill(
        lambda count, place: _sample_round(run, run.stream.next(count), step, place, store),
        wanted=config.rl.prompts_per_step // run.groups.replica_count,
        rounds=config.rl.sampling_rounds if dynamic else 1,
        dynamic=dynamic,
    )
    return [settle_overlong(group, config.rewards, config.sampling.max_new_tokens) for group in groups]


def fill(
    sample_round: Callable[[int, int], list[Group]], *, wanted: int, rounds: int, dynamic: bool
) -> list[Group]:
    """Groups of as many rounds as it takes to keep `wanted` of them. sample_round(count, place): that many more groups,
    of which `place` came before. dynamic: whether groups of equal rewards are dropped."""
    groups: list[Group] = []
    for _ in range(rounds):
        missing = wanted - sum(g.dropped is None for g in groups)
        if not missing:
            break
        sampled = sample_round(missing, len(groups))
        groups += [_dropped_if_same(g) for g in sampled] if dynamic else sampled
    return groups


def _dropped_if_same(group: Group) -> Group:
    rewards = {s.reward for s in group.samples if s.reward is not None}
    return group if len(rewards) > 1 else replace(group, dropped=SAME_REWARD)


def _sample_round(
    run: Run, prompts: list[Prompt], step: int, place: int, store: RouteStore | None
) -> list[Group]:
    config, groups = run.config, run.groups
    sampled = None
    if groups.is_leader:
        total = len(prompts) * (config.rl.group_size + ("greedy_rewards" in run.recipe.needs))
        with progress(f"Step {step}: generating", total, unit="responses", enabled=groups.is_main) as bar:
            sampled = sample_groups(
                engine_of(run),
                run.scorer,
                prompts,
                group_size=config.rl.group_size,
                sampling=SamplingParams(
                    max_new_tokens=config.sampling.max_new_tokens,
                    temperature=config.sampling.temperature,
                    top_p=config.sampling.top_p,
                    top_k=config.sampling.top_k,
                    min_p=config.sampling.min_p,
                    stop_token_ids=tuple(run.tokenizer.stop_token_ids),
                ),
                decode=run.tokenizer.decode,
                seed=config.seed,
                step=step,
                place=place,
                return_routes=store is not None,
                greedy="greedy_rewards" in run.recipe.needs,
                on_response=bar.advance,
            )
    return share_groups(run, sampled, store)


def rl_step(run: Run, updater: Updater, writer: SampleWriter, step: int) -> dict[str, float]:
    """Sample, score, learn, sync; returns the step's metrics. Collective."""
    start = time.perf_counter()
    with contextlib.closing(RouteStore(in_memory_bytes=run.config.rl.routes_in_memory_mib << 20)) as store:
        wanted = store if run.sources.routing_replay == "engine" or run.config.rl.compare_routes else None
        with run.clock.phase("generate"):
            groups = sample(run, step, wanted)
        on_main(run.groups, lambda: writer.write(step, groups))
        groups, staleness = settle_staleness(
            groups, version=step - 1, most=run.config.rl.max_staleness, then=run.config.rl.stale_responses
        )
        counts = run.groups.gather_from_replicas(rollout_counts(groups, shows_work) | staleness.counts())
        with run.clock.phase("train"):
            batches = split(groups, updater.settings, run.policy, seed=run.config.seed, step=step)
            audited = audit(run, updater, batches, step)
            metrics = updater.update(batches, wanted) | audited
    with run.clock.phase("sync"):
        metrics |= sync(run.seat, run.name_map, run.groups, version=step)
    metrics |= merge_counts(counts, "rollout")
    seconds = run.clock.take_step()
    step_time = time.perf_counter() - start
    return metrics | {
        "perf/step_time": step_time,
        "perf/generate_seconds": seconds["generate"],
        "perf/train_seconds": seconds["train"],
        "sync/seconds": seconds["sync"],
        "perf/tokens_per_second": metrics["rollout/tokens"] / step_time,
        "perf/generate_tokens_per_second": metrics["rollout/tokens"] / seconds["generate"],
    }


def audit(run: Run, updater: Updater, batches: Sequence[Batch], step: int) -> dict[str, float]:
    """Every `rl.audit_every` steps, a sample's log-probabilities from engine and trainer compared. Collective."""
    if not run.config.rl.audit_every or step % run.config.rl.audit_every:
        return {}
    share = -(-run.config.rl.audit_responses // run.groups.replica_count)
    batch = draw_audit(
        batches, updater.settings, run.policy, responses=share, seed=run.config.seed, step=step
    )
    return updater.audit(batch)


def run_rl(
    run: Run,
    *,
    first_step: int = 1,
    after_step: Callable[[int, Mapping[str, float]], None] = lambda step, evaluation: None,
) -> None:
    """Steps `first_step` to `rl.steps`. Collective. The trainer has this stage's optimizer, the engine its weights.

    after_step(step, evaluation): called when a step is done and logged; the evaluation is empty where none was due.
    """
    config = run.config
    updater = Updater(
        run.policy, update_settings(run), reference=run.extras.reference, critic=run.extras.critic
    )
    writer = SampleWriter(run.folder, every=config.log.samples_every, enabled=run.groups.is_main)
    left = config.rl.steps - first_step + 1
    with progress("RL", left, unit="steps", enabled=run.groups.is_main) as bar:
        for step in range(first_step, config.rl.steps + 1):
            metrics = rl_step(run, updater, writer, step)
            evaluation: dict[str, float] = {}
            every = config.evaluation.every
            if step == config.rl.steps or (every and step % every == 0):
                with run.clock.phase("evaluate"):
                    evaluation = evaluate(run, step=step)
            run.log(config.sft.steps + step, metrics | evaluation)
            if run.extras.reference and (often := config.rl.reference.replace_every) and step % often == 0:
                run.extras.reference.replace()
            after_step(step, evaluation)
            bar.advance()
