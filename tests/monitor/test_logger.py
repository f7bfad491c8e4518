"""One log call, every sink; resumed runs go on where they were."""

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.monitor.console import ConsoleSink, number
from megarl.monitor.jsonl import read_metrics
from megarl.monitor.logger import MetricLogger, open_logger
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import UnregisteredMetric
from megarl.monitor.settings import LogSettings
from megarl.monitor.wandb_sink import WandbSink


def test_an_unregistered_name_reaches_no_sink(tmp_path: Path) -> None:
    logger = open_logger(tmp_path, LogSettings(sinks=["jsonl"]))
    with pytest.raises(UnregisteredMetric):
        logger.log(0, {"train/lr": 1.0, "train/nonsense": 1.0})
    logger.log(0, {"train/lr": 1.0})
    logger.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [(0, {"train/lr": 1.0})]


def test_the_console_line_holds_the_few_numbers_that_matter() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    sink = ConsoleSink(default_registry(), total_steps=60, console=console)
    sink.log(
        7,
        {
            "perf/step_time": 5.123,
            "rollout/reward_mean": 0.61234,
            "rollout/tokens": 9.0,
            "train/grad_norm": 88.0,
        },
    )
    assert stream.getvalue() == "step  7/60 | reward 0.612 | grad 88 | s/step 5.12\n", (
        "one line, however narrow"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.61234, "0.612"),
        (-48.123, "-48.1"),
        (8.0, "8"),
        (3412.0, "3.41k"),
        (2.5e7, "25M"),
        (7e15, "7.00e+15"),
        (1.2e-6, "1.2e-06"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert number(value) == text


def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_at, steps, lr in ((None, range(5), 1.0), (3, range(3, 6), 2.0)):
        logger = open_logger(tmp_path, LogSettings(sinks=["tensorboard"]), resume_at=resume_at)
        for step in steps:
            logger.log(step, {"train/lr": lr})
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/lr")] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library reads its variables once."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    wandb.teardown()
    yield
    wandb.teardown()


def wandb_records(file: Path, kind: str) -> list[Any]:
    """What an offline run would send to W&B, of this kind."""
    from wandb.proto import wandb_internal_pb2

    records = [wandb_internal_pb2.Record.FromString(part) for part in leveldb_records(file.read_bytes())]
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """The history that the offline runs under `folder` would send to W&B, one dict a logged step."""
    return [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in history.item}
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        for history in wandb_records(file, "history")
    ]


def wandb_end(file: Path) -> tuple[int, bool]:
    """The exit code that an offline run would tell W&B, and whether it would say that it was preempted."""
    deadline = time.monotonic() + 30  # W&B's own process may still be writing
    while not (ends := wandb_records(file, "exit")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return ends[0].exit_code, bool(wandb_records(file, "preempting"))


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a leveldb log with W&B's 7-byte header: crc (4 bytes), length (2), type (1), payload."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_runs_offline_without_a_key_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, offline_wandb: None
) -> None:
    for resume_at, lr in ((None, 0.5), (1, 0.25)):
        logger = open_logger(
            tmp_path, LogSettings(sinks=["wandb"]), resume_at=resume_at, run_config={"seed": 1}
        )
        logger.log(resume_at or 0, {"train/lr": lr})
        logger.close(1 if resume_at is None else 0)
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [run.name for run in runs] == [f"run-{run_id}.wandb"] * 2

    deadline = time.monotonic() + 30  # W&B's own process may still be writing when `close` returns
    while len(rows := wandb_rows(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [(row["step"], row["train/lr"]) for row in rows] == [(0, 0.5), (1, 0.25)]
    assert [wandb_end(run) for run in runs] == [(1, False), (0, False)]
    (described, _) = (wandb_records(run, "run")[0] for run in runs)
    assert (described.project, described.display_name) == ("megarl", tmp_path.name)


def test_what_the_user_told_wandb_holds_unless_the_configuration_says_otherwise(
    tmp_path: Path, offline_wandb: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"NAME": "theirs", "PROJECT": "of all", "ENTITY": "us", "RUN_GROUP": "g", "TAGS": "a,b"}
    theirs |= {"NOTES": "n", "JOB_TYPE": "j", "RUN_ID": "abc", "DIR": str(tmp_path / "elsewhere")}
    (tmp_path / "elsewhere").mkdir()
    for name, value in theirs.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for project in (None, "ours"):
        logger = open_logger(tmp_path, LogSettings(sinks=["wandb"], project=project), run_name="run")
        logger.close(143)
    files = sorted((tmp_path / "elsewhere").glob("wandb/offline-run-*/run-abc.wandb"))
    assert [wandb_end(file) for file in files] == [(143, True)] * 2
    first, second = (wandb_records(file, "run")[0] for file in files)
    assert (first.display_name, first.entity, first.run_group) == ("theirs", "us", "g")
    assert (first.notes, first.job_type, list(first.tags)) == ("n", "j", ["a", "b"])
    assert (first.project, second.project) == ("of all", "ours")
    assert (tmp_path / "wandb_run_id").read_text() == "abc\n"


def test_a_wandb_failure_warns_once_and_training_goes_on(tmp_path: Path, offline_wandb: None) -> None:
    (tmp_path / "wandb_run_id").write_text("not / a : valid id\n")
    with pytest.warns(RuntimeWarning, match="W&B failed and is off"):
        sink = WandbSink(tmp_path)
    logger = MetricLogger([sink], default_registry())
    logger.log(0, {"train/lr": 1.0})
    logger.close()


def test_wandb_missing_warns_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(RuntimeWarning, match="W&B failed"):
        sink = WandbSink(tmp_path)
    sink.log(0, {"train/lr": 1.0})
    sink.close()
