"""Everything a run is made of, opened in the order in which a mistake is cheapest."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

import torch

from megarl.config.schema import Config
from megarl.data.demonstrations import Demonstrations
from megarl.data.prompts import PromptData, open_prompts
from megarl.data.stream import PromptStream
from megarl.data.tokenizer import ChatTokenizer, load_tokenizer
from megarl.errors import UserError
from megarl.megatron import groups as process_groups
from megarl.megatron.groups import Groups
from megarl.megatron.platform import Platform
from megarl.megatron.policy import Policy
from megarl.monitor.alarms import AlarmWatch, stop_if_told
from megarl.monitor.logger import MetricLogger
from megarl.monitor.metrics import default_registry
from megarl.monitor.progress import progress
from megarl.monitor.signals import StopSignals
from megarl.monitor.status import print_status
from megarl.rewards import Scorer
from megarl.training.clock import Clock
from megarl.training.engines import EngineHandle, connect_engine, engine_context
from megarl.training.evaluation import Evaluation
from megarl.training.resolve import Plan, StagePlan, open_watch
from megarl.training.stages.settings import SftSettings
from megarl.weights.checkpoint_files import CheckpointReader
from megarl.weights.exchange import load
from megarl.weights.mapping import NameMap

LOCK = ".lock"


@dataclass
class Run:
    """One rank's view of a run. Its folder is written by the main rank alone; the logger is opened once it is known
    where the run goes on. start_folder: the Hugging Face folder that the policy begins with."""

    plan: Plan
    groups: Groups
    tokenizer: ChatTokenizer
    prompts: PromptData
    prompt_stream: PromptStream
    demonstrations: Demonstrations | None
    start_folder: Path
    policy: Policy
    name_map: NameMap
    scorer: Scorer
    engine_handle: EngineHandle
    evaluation: Evaluation
    logger: MetricLogger
    watch: AlarmWatch
    clock: Clock
    lock: IO[str] | None
    stop: StopSignals = field(default_factory=StopSignals)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step of the whole run, and print what alarms it rings. Collective. Raises AlarmStop, or a sink's
        UserError, on every rank."""

        def log() -> None:
            self.logger.log(step, metrics)
            alarms = self.watch.check(step, metrics)
            for alarm in alarms:
                print_status(f"alarm: {alarm}")
            stop_if_told(alarms)

        self.groups.on_main(log)

    def told_to_stop(self) -> int:
        """Return the number of the signal that has told any of the ranks to end, or 0. Collective."""
        return self.groups.largest(self.stop.number)

    def close(self, exit_code: int = 0) -> None:
        """End everything that was opened, all of it whatever fails. exit_code: the sinks are told it."""
        with ExitStack() as closing:  # the last comes first
            if self.lock is not None:
                closing.callback(self.lock.close)
            closing.callback(self.logger.close, exit_code)
            closing.callback(self.scorer.close)
            closing.callback(self.engine_handle.close)


def join_ranks(plan: Plan) -> tuple[Groups, IO[str] | None]:
    """Join the other ranks, and lock the run folder on the main rank. Collective. Raises UserError, on every rank."""
    config = plan.config
    groups = process_groups.initialize(
        plan.layout,
        Platform.detect(config.platform),
        seed=config.seed,
        timeout_seconds=int(config.launch.timeout_minutes * 60),
    )
    torch.manual_seed(config.seed)
    return groups, groups.on_main(lambda: lock_folder(plan.folder))


def open_run(
    plan: Plan, groups: Groups, lock: IO[str] | None, left: Sequence[StagePlan], began: datetime | None = None
) -> Run:
    """Open a run on this rank. left: its stages that are not over, whose data are opened. began: the date for chat
    templates that write one; None = now. Collective. Raises UserError, on every rank, before anything costly."""
    config, folder = plan.config, plan.folder
    platform, clock = Platform.detect(config.platform), Clock()
    with clock.phase("set-up"):
        with progress("Opening the tokenizer", enabled=groups.is_main, announce=True):
            tokenizer = open_tokenizer(config, began)
        start = Path(str(config.model.path))
        tokenizer.check_embedding(plan.architecture.vocab_size)
        if groups.is_main:
            print_status(tokenizer.describe_stops())
        with progress("Opening the data", enabled=groups.is_main, announce=True):
            prompts = open_prompts(plan.data, tokenizer)
            demonstrations = open_demonstrations(left, tokenizer, plan.architecture.max_positions)
        scorer = Scorer(config.rewards)
        scorer.check(prompts.verifiers)
        with progress("Building the model", enabled=groups.is_main, announce=True):
            policy = Policy(
                plan.architecture,
                plan.layout,
                platform,
                groups,
                config.model,
                logprob_chunk=config.batching.logprob_chunk,
            )
            name_map = NameMap(plan.hf_config, policy)
            load(name_map, CheckpointReader(start))
        with progress("Starting the engine", enabled=groups.is_main, announce=True):
            dtype = platform.dtype_of(config.model.dtype)
            context = engine_context(config, plan.architecture, model_path=start, folder=folder, dtype=dtype)
            engine = connect_engine(groups, config.engine, context)
    return Run(
        plan=plan,
        groups=groups,
        tokenizer=tokenizer,
        prompts=prompts,
        prompt_stream=prompts.stream(groups.replica_index, groups.replica_count),
        demonstrations=demonstrations,
        start_folder=start,
        policy=policy,
        name_map=name_map,
        scorer=scorer,
        engine_handle=engine,
        evaluation=Evaluation(
            prompts.heldout,
            engine,
            scorer,
            tokenizer,
            groups,
            max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
            seed=config.seed,
        ),
        logger=MetricLogger((), default_registry()),
        watch=open_watch(config),
        clock=clock,
        lock=lock,
    )


def lock_folder(folder: Path) -> IO[str]:
    """Make the run folder and keep other runs out of it while the returned file is open. Raises UserError where it
    can't be written or has a run at work in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise UserError(
            f"{folder}: the run folder cannot be written ({error.strerror}); set folder=..."
        ) from error
    for _ in range(50):  # five seconds: workers of a run that was killed may hold it until they notice
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return lock
    lock.close()
    raise UserError(
        f"{folder}: another run is at work in this folder: wait for its end, or set another name=..."
    )


def open_tokenizer(config: Config, now: datetime | None = None) -> ChatTokenizer:
    """Open the policy's tokenizer. now: what a chat template that asks for the date is told; None = the clock."""
    model = config.model
    folder = str(model.tokenizer or model.path)
    return load_tokenizer(folder, model.chat_template, model.template_options, now, model=model.path)


def open_demonstrations(
    stages: Sequence[StagePlan], tokenizer: ChatTokenizer, max_positions: int
) -> Demonstrations | None:
    """Open what the cold start learns from; None where these stages have none."""
    for stage in stages:
        if isinstance(stage.settings, SftSettings) and stage.settings.demonstrations is not None:
            return Demonstrations(stage.settings.demonstrations, tokenizer, max_tokens=max_positions)
    return None
