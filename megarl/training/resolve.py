"""From a configuration to a plan: everything that can be decided, and refused, before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import LogprobAndRouteSource, Recipe, make_recipe, resolve_sources
from megarl.config.rules import check_files
from megarl.config.schema import Config
from megarl.data.settings import DataSettings
from megarl.errors import UserError
from megarl.megatron.architecture import Architecture
from megarl.megatron.model import check_fits, transformer_config
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout
from megarl.monitor.alarms import DEFAULT_RULES, AlarmWatch
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import UnregisteredMetric
from megarl.training.engines import check_engine
from megarl.training.stages.settings import StageSettings
from megarl.weights.checkpoint_files import read_config
from megarl.weights.families import family_of


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run. settings: of its kind, which opens it. first: steps of the whole run that come before it."""

    name: str
    settings: StageSettings
    first: int

    @property
    def steps(self) -> int:
        return self.settings.steps


@dataclass(frozen=True)
class Plan:
    """What a run will be, shared by `check` and `train`.

    folder: the run's files. hf_config: the policy's config.json. data: with the longest prompt that leaves room for a
    response. recipe, sources: the objective, and where its old log-probabilities and routes come from. minibatches:
    optimizer steps per rollout.
    """

    config: Config
    world_size: int
    folder: Path
    layout: Layout
    hf_config: Mapping[str, Any]
    architecture: Architecture
    data: DataSettings
    recipe: Recipe
    sources: LogprobAndRouteSource
    minibatches: int
    stages: tuple[StagePlan, ...]

    @property
    def total_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stages_from(self, name: str) -> tuple[StagePlan, ...]:
        """Return the stage of this name and those after it."""
        names = [stage.name for stage in self.stages]
        return self.stages[names.index(name) :]


def resolve(config: Config, world_size: int) -> Plan:
    """Decide what a run of so many ranks will be, from files no larger than a config.json.

    Raises UserError for the first thing that is wrong, what is cheap to see first: counts, alarms, model, layout, data,
    algorithm, engine.
    """
    layout = config.parallel
    _check_shares(config, max(1, world_size // layout.replica_ranks()))
    open_watch(config)
    check_files(config)
    start = Path(str(config.model.path))
    hf_config = read_config(start)
    architecture = family_of(hf_config, source=str(start / "config.json")).architecture(hf_config)
    check_fits(architecture, layout, config.model.transformer)
    if problem := layout.problem(world_size):
        raise UserError(f"parallel: {problem}; change parallel.* or the number of ranks")
    if config.platform != "cuda" or torch.cuda.is_available():  # else this machine is not the one it is for
        platform = Platform.detect(config.platform)
        transformer_config(architecture, layout, platform, config.model)
    data = _fit_context(config, architecture.max_positions)
    recipe, sources = _resolve_algorithm(config, moe=bool(architecture.moe_layers))
    _check_warm_ups(config, recipe)
    check_engine(config, architecture)
    return Plan(
        config=config,
        world_size=world_size,
        folder=Path(config.folder or f"runs/{config.name}"),
        layout=layout,
        hf_config=hf_config,
        architecture=architecture,
        data=data,
        recipe=recipe,
        sources=sources,
        minibatches=config.rl.minibatches or recipe.minibatches,
        stages=_stages(config),
    )


def _stages(config: Config) -> tuple[StagePlan, ...]:
    """A cold start, where there is one, and reinforcement learning."""
    rl = StagePlan("rl", config.rl, first=config.sft.steps)
    return (StagePlan("sft", config.sft, first=0), rl) if config.sft.steps else (rl,)


def _check_shares(config: Config, replicas: int) -> None:
    """Raises UserError unless every data-parallel replica gets an equal share of a step's prompts."""
    for key, count, steps in (
        ("sft.batch_size", config.sft.batch_size, config.sft.steps),
        ("rl.prompts_per_step", config.rl.prompts_per_step, config.rl.steps),
    ):
        if steps and count % replicas:
            raise UserError(
                f"{key}={count} can't be shared out equally to {replicas} data-parallel replicas: set a multiple of "
                f"{replicas}"
            )


def _check_warm_ups(config: Config, recipe: Recipe) -> None:
    """Raises UserError for a warm-up that is longer than the run of its optimizer."""
    rl_steps = config.rl.steps * (config.rl.minibatches or recipe.minibatches)
    for key, optimizer, steps in (
        ("sft.optimizer", config.sft.optimizer, config.sft.steps),
        ("rl.optimizer", config.rl.optimizer, rl_steps),
        ("rl.critic.optimizer", config.rl.critic.optimizer, rl_steps if "values" in recipe.needs else 0),
    ):
        if steps and optimizer.warmup_steps > steps:
            raise UserError(
                f"{key}.warmup_steps={optimizer.warmup_steps} is more than the {steps} optimizer steps of its stage: "
                f"the learning rate would never reach {key}.lr. Lower it, or raise {key.split('.')[0]}.steps"
            )


def open_watch(config: Config) -> AlarmWatch:
    """Make the run's alarms. Raises UserError for a rule about a metric that nothing logs."""
    registry = default_registry()
    for rule in config.alarms.rules:
        try:
            _ = registry[rule.metric]
        except UnregisteredMetric as error:
            raise UserError(f"alarms.rules: {error}") from error
    return AlarmWatch([*(DEFAULT_RULES if config.alarms.defaults else ()), *config.alarms.rules], registry)


def _fit_context(config: Config, max_positions: int) -> DataSettings:
    """The data's settings, with the longest prompt that leaves room for a response in the model's context. Raises
    UserError where there is none."""
    budget, key = max(
        (config.sampling.max_new_tokens, "sampling.max_new_tokens"),
        (config.evaluation.max_new_tokens or 0, "evaluation.max_new_tokens"),
    )
    if budget >= max_positions:
        raise UserError(
            f"{key}={budget} leaves no room for a prompt in the model's context of "
            f"{max_positions} tokens: lower it"
        )
    asked = config.data.max_prompt_tokens
    if asked is not None and asked + budget > max_positions:
        raise UserError(
            f"data.max_prompt_tokens={asked} and {key}={budget} together exceed the model's "
            f"context of {max_positions} tokens: lower one of them"
        )
    return config.data.model_copy(update={"max_prompt_tokens": asked or max_positions - budget})


def _resolve_algorithm(config: Config, *, moe: bool) -> tuple[Recipe, LogprobAndRouteSource]:
    """The objective and where its old log-probabilities and routes come from. Raises UserError."""
    rl, recipe = config.rl, make_recipe(config.algorithm)
    minibatches = rl.minibatches or recipe.minibatches
    if rl.steps and rl.prompts_per_step * rl.group_size < minibatches:
        raise UserError(
            f"rl.prompts_per_step: {rl.prompts_per_step} prompts x {rl.group_size} responses are fewer "
            f"than the {minibatches} mini-batches of {recipe.name}: raise rl.prompts_per_step, or lower rl.minibatches"
        )
    if rl.steps and rl.group_size == 1 and recipe.compares_group:
        raise UserError(
            f"rl.group_size: {recipe.name} compares the responses to a prompt, and one alone has advantage 0: nothing "
            "would be learned. Raise it (8 is usual), or take an algorithm without groups (reinforce_pp, remax, ppo)"
        )
    sources = resolve_sources(recipe, moe=moe, minibatches=rl.minibatches)
    if rl.compare_routes and not moe:
        raise UserError("rl.compare_routes: a dense model has no routes; set rl.compare_routes=false")
    if rl.compare_routes and sources.routing_replay == "recorded":
        raise UserError(
            "rl.compare_routes: the trainer's own routes are recorded and replayed, so the engine's would be compared "
            "with nothing: set rl.compare_routes=false, or algorithm.routing_replay=engine"
        )
    if rl.stale_responses == "correct" and recipe.correction == "none":
        raise UserError(
            f"rl.stale_responses: {recipe.name} has no correction for responses of older weights: set "
            "algorithm.correction (tis, mis, ...), or rl.stale_responses to drop or stop"
        )
    narrowed = config.sampling.top_p < 1 or config.sampling.top_k != -1 or config.sampling.min_p > 0
    if narrowed and sources.old_logprobs == "engine":
        raise UserError(
            "sampling: top_p, top_k or min_p draw from another distribution than the trainer computes, so the "
            "engine's log-probabilities can't stand for it: leave them at 1, -1 and 0, or set "
            "algorithm.old_logprobs=recompute"
        )
    return recipe, sources
