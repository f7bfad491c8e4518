"""Everything a run is made of, opened in the order in which a mistake is cheapest."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from megarl.algorithms import Recipe, Sources, make_recipe, resolve_sources
from megarl.config.schema import Config
from megarl.data.demonstrations import Demonstrations, FileDemonstrations
from megarl.data.prompts import PromptData, open_prompts, sample_texts
from megarl.data.settings import DataSettings
from megarl.data.stream import PromptStream
from megarl.data.tiny_tokenizer import build_tokenizer
from megarl.data.tokenizer import ChatTokenizer, load_tokenizer
from megarl.errors import UserError
from megarl.megatron import groups as process_groups
from megarl.megatron.critic import Critic
from megarl.megatron.groups import Groups
from megarl.megatron.layout import Layout
from megarl.megatron.model import ModelSettings
from megarl.megatron.platform import Platform
from megarl.megatron.policy import OptimizerSettings, Policy
from megarl.megatron.reference import ReferencePolicy
from megarl.monitor.alarms import DEFAULT_RULES, AlarmRule, AlarmWatch, stop_if_told
from megarl.monitor.files import writing
from megarl.monitor.logger import Logger, NullLogger
from megarl.monitor.metrics import default_registry
from megarl.monitor.progress import progress
from megarl.monitor.registry import UnregisteredMetric
from megarl.monitor.tell import tell
from megarl.records import StepStats
from megarl.rewards import Scorer
from megarl.rollout.engine import Engine
from megarl.training.engines import Seat, take_seat
from megarl.training.make_engine import check_engine, engine_maker
from megarl.training.make_model import make_checkpoint
from megarl.weights.checkpoint_files import CheckpointReader, read_config
from megarl.weights.exchange import load
from megarl.weights.families import family_of
from megarl.weights.mapping import NameMap

CLAIM = ".claim"
T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_folder(config: Config) -> Path:
    """Where a run's files lie."""
    return Path(config.folder or f"runs/{config.name}")


def layout_of(config: Config) -> Layout:
    return Layout(**config.parallel.model_dump())


def optimizer_of(section: Any, total_steps: int) -> OptimizerSettings:
    """A stage's optimizer; its schedule decays over the stage."""
    return OptimizerSettings(**section.model_dump(), decay_steps=max(1, total_steps))


@dataclass
class Clock:
    """Seconds by phase, for the final table and for each step's metrics."""

    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.total[name] += seconds
            self.step[name] += seconds

    def take_step(self) -> dict[str, float]:
        taken, self.step = dict(self.step), defaultdict(float)
        return taken


@dataclass
class Extras:
    """What some algorithms need beside the policy: made when RL begins, kept in the checkpoints."""

    reference: ReferencePolicy | None = None
    critic: Critic | None = None


@dataclass
class Run:
    """One rank's view of a run. Its folder is written by the main rank alone; the logger is opened once it is known
    where the run goes on."""

    config: Config
    folder: Path
    groups: Groups
    recipe: Recipe
    sources: Sources
    tokenizer: ChatTokenizer
    prompts: PromptData
    demonstrations: Demonstrations | FileDemonstrations
    stream: PromptStream
    hf_config: Mapping[str, Any]
    start_folder: Path
    policy: Policy
    name_map: NameMap
    scorer: Scorer
    seat: Seat
    logger: Logger
    watch: AlarmWatch
    clock: Clock
    claim: IO[str] | None
    extras: Extras = field(default_factory=Extras)

    @property
    def minibatches(self) -> int:
        return minibatches_of(self.config, self.recipe)

    @property
    def max_positions(self) -> int:
        return self.policy.architecture.max_positions

    def make_extras(self) -> None:
        """The reference and the critic that the algorithm needs, from the policy of now. Collective."""
        if "ref_logprobs" in self.recipe.needs:
            self.extras.reference = ReferencePolicy(self.policy)
        if "values" in self.recipe.needs:
            self.extras.critic = Critic(self.policy)
            section, steps = self.config.rl.critic.optimizer, self.config.rl.steps * self.minibatches
            self.extras.critic.set_optimizer(optimizer_of(section, steps))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step, and tell what alarms it rings. Collective. Raises AlarmStop, or a sink's UserError, on every
        rank."""

        def log() -> None:
            stats = StepStats(step, metrics)
            self.logger.log(stats)
            alarms = self.watch.check(stats)
            for alarm in alarms:
                tell(f"alarm: {alarm}")
            stop_if_told(alarms)

        on_main(self.groups, log)

    def close(self) -> None:
        self.seat.close()
        self.scorer.close()
        self.logger.close()
        if self.claim is not None:
            self.claim.close()


def minibatches_of(config: Config, recipe: Recipe) -> int:
    """Optimizer steps per rollout."""
    return config.rl.minibatches or recipe.minibatches


def check_shares(config: Config, replicas: int) -> None:
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


def check_recipe(config: Config, *, moe: bool) -> tuple[Recipe, Sources]:
    """The objective and where its old log-probabilities and routes come from. Raises UserError."""
    recipe = make_recipe(config.algorithm)
    responses, minibatches = config.rl.prompts_per_step * config.rl.group_size, minibatches_of(config, recipe)
    if config.rl.steps and responses < minibatches:
        raise UserError(
            f"rl.prompts_per_step: {config.rl.prompts_per_step} prompts x {config.rl.group_size} responses are fewer "
            f"than the {minibatches} mini-batches of {recipe.name}: raise rl.prompts_per_step, or lower rl.minibatches"
        )
    if config.rl.steps and config.rl.group_size == 1 and recipe.compares_group:
        raise UserError(
            f"rl.group_size: {recipe.name} compares the responses to a prompt, and one alone has advantage 0: nothing "
            "would be learned. Raise it (8 is usual), or take an algorithm without groups (reinforce_pp, remax, ppo)"
        )
    sources = resolve_sources(recipe, moe=moe, minibatches=config.rl.minibatches)
    if config.rl.compare_routes and not moe:
        raise UserError("rl.compare_routes: a dense model has no routes; set rl.compare_routes=false")
    if config.rl.compare_routes and sources.routing_replay == "recorded":
        raise UserError(
            "rl.compare_routes: the trainer's own routes are recorded and replayed, so the engine's would be compared "
            "with nothing: set rl.compare_routes=false, or algorithm.routing_replay=engine"
        )
    if config.rl.stale_responses == "correct" and recipe.correction == "none":
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


def open_watch(config: Config) -> AlarmWatch:
    """The run's alarms. Raises UserError for a rule about a metric that nothing logs."""
    rules = [AlarmRule(**rule.model_dump()) for rule in config.alarms.rules]
    registry = default_registry()
    for rule in rules:
        try:
            _ = registry[rule.metric]
        except UnregisteredMetric as error:
            raise UserError(f"alarms.rules: {error}") from error
    return AlarmWatch([*(DEFAULT_RULES if config.alarms.defaults else ()), *rules], registry)


def claim_folder(folder: Path) -> IO[str]:
    """Make the run folder and keep other runs out of it while the returned file is open. Raises UserError where it
    can't be written or has a run at work in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = (folder / CLAIM).open("w")
    except OSError as error:
        raise UserError(
            f"{folder}: the run folder cannot be written ({error.strerror}); set folder=..."
        ) from error
    for _ in range(50):  # five seconds: workers of a run that was killed may hold it until they notice
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return claim
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return claim
    claim.close()
    raise UserError(
        f"{folder}: another run is at work in this folder: wait for its end, or set another name=..."
    )


def open_run(config: Config) -> Run:
    """Open a run on this rank. Collective. Raises UserError, on every rank, before anything costly."""
    folder = run_folder(config)
    platform = Platform.detect(config.platform)
    groups = process_groups.initialize(
        layout_of(config), platform, seed=config.seed, timeout_seconds=int(config.launch.timeout_minutes * 60)
    )
    check_shares(config, groups.replica_count)
    torch.manual_seed(config.seed)
    clock = Clock()
    with clock.phase("set-up"):
        watch = open_watch(config)
        claim = on_main(groups, lambda: claim_folder(folder))
        with progress("Opening the tokenizer", enabled=groups.is_main, announce=True):
            tokenizer = open_tokenizer(config, folder, groups)
        start = Path(config.model.path) if config.model.path else folder / "start"
        if config.model.make is not None:
            made = config.model.make
            on_main(groups, lambda: make_checkpoint(made, tokenizer, start, seed=config.seed))
        hf_config = read_config(start)
        architecture = family_of(hf_config, source=str(start / "config.json")).architecture(hf_config)
        recipe, sources = check_recipe(config, moe=bool(architecture.moe_layers))
        check_engine(config, architecture)
        tokenizer.check_embedding(architecture.vocab_size)
        with progress("Opening the data", enabled=groups.is_main, announce=True):
            prompts = open_prompts(check_context(config, architecture.max_positions), tokenizer)
            demonstrations = open_demonstrations(config, tokenizer, architecture.max_positions)
        scorer = Scorer(config.rewards)
        scorer.check(prompts.verifiers)
        settings = model_settings(config, platform)
        with progress("Building the model", enabled=groups.is_main, announce=True):
            policy = Policy(
                architecture,
                layout_of(config),
                platform,
                groups,
                settings,
                logprob_chunk=config.batching.logprob_chunk,
            )
            name_map = NameMap(hf_config, policy)
            load(name_map, CheckpointReader(start))
        with progress("Starting the engine", enabled=groups.is_main, announce=True):
            make = engine_maker(config, folder, start, architecture, settings.params_dtype)
            seat = take_seat(groups, make, shared=config.engine.kind == "sglang")
    return Run(
        config,
        folder,
        groups,
        recipe,
        sources,
        tokenizer,
        prompts,
        demonstrations,
        prompts.stream(groups.replica_index, groups.replica_count),
        hf_config,
        start,
        policy,
        name_map,
        scorer,
        seat,
        NullLogger(),
        watch,
        clock,
        claim,
    )


def on_main(groups: Groups, action: Callable[[], T]) -> T | None:
    """Do it on the main rank, which gets what it returns; its UserError is raised on every rank. Collective."""
    done, problem = None, None
    if groups.is_main:
        try:
            done = action()
        except UserError as error:
            problem = (type(error), str(error))
    if (problem := groups.share_from_main(problem)) is not None:
        kind, message = problem
        raise kind(message)
    return done


def model_settings(config: Config, platform: Platform) -> ModelSettings:
    model = config.model
    return ModelSettings(
        platform.dtype if model.dtype == "auto" else DTYPES[model.dtype],
        model.recompute,
        model.float32_lm_head,
        model.load_balancing,
        model.load_balancing_rate,
        model.transformer,
    )


def open_tokenizer(config: Config, folder: Path, groups: Groups | None = None) -> ChatTokenizer:
    """The policy's tokenizer; a `tiny` one is built in `folder`, by the main rank of `groups`. Collective."""
    place = Path(config.model.tokenizer or config.model.path or "")
    if config.model.tokenizer == "tiny":
        place = folder / "tokenizer"
        if groups is None:
            _build_tiny_tokenizer(config, place)
        else:
            on_main(groups, lambda: _build_tiny_tokenizer(config, place))
    return load_tokenizer(place, config.model.chat_template, config.model.template_options)


def _build_tiny_tokenizer(config: Config, folder: Path) -> None:
    """For the questions of the data and the demonstrations' answers."""
    texts = sample_texts(config.data.sources)
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        build_tokenizer(folder, [*texts, *["Answer: "] * len(texts)], config.model.tokenizer_vocab)


def check_context(config: Config, max_positions: int) -> DataSettings:
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


def open_demonstrations(
    config: Config, tokenizer: ChatTokenizer, max_positions: int
) -> Demonstrations | FileDemonstrations:
    section = config.sft.demonstrations
    if section.file is None or not config.sft.steps:
        return Demonstrations(
            tokenizer, worked_share=section.worked_share, openings=section.openings, seed=section.seed
        )
    return FileDemonstrations(section.file, tokenizer, seed=section.seed, max_tokens=max_positions)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def engine_of(run: Run) -> Engine:
    assert run.seat.engine is not None, "only replica leaders sample"
    return run.seat.engine
