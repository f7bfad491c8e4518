"""The final table, and the report made from `metrics.jsonl` alone."""

import csv
import math
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.monitor.jsonl import JsonlSink, read_metrics
from megarl.monitor.report import RunReport, print_summary, report_run, sum_up


def a_run(folder: Path) -> Path:
    sink = JsonlSink(folder / "metrics.jsonl")
    accuracies = [0.2, 0.7, 0.9, 0.8]
    for step, accuracy in enumerate(accuracies):
        metrics = {"rollout/accuracy": accuracy, "perf/step_time": 30.0, "train/grad_norm": 1.0}
        if step == 2:
            metrics |= {"train/grad_norm": math.nan}
        if step in (0, 3):
            metrics |= {"eval/accuracy": accuracy}
        sink.log(step, metrics)
    sink.close()
    return folder


def report_of(folder: Path) -> RunReport:
    return sum_up(list(read_metrics(folder / "metrics.jsonl")))


def test_the_report_finds_first_last_best_and_the_time(tmp_path: Path) -> None:
    report = report_of(a_run(tmp_path))
    assert (report.steps, report.last_step) == (4, 3)
    assert (report.first["rollout/accuracy"], report.last["rollout/accuracy"]) == (0.2, 0.8)
    assert report.best["rollout/accuracy"] == (2, 0.9)
    assert report.seconds["perf/step_time"] == 120.0


def test_the_report_tells_the_alarms_the_run_had(tmp_path: Path) -> None:
    report = report_of(a_run(tmp_path))
    assert [(alarm.step, alarm.rule.metric, alarm.rule.when) for alarm in report.alarms] == [
        (2, "train/grad_norm", "not_finite")
    ]


def test_nan_is_never_the_best(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, value in enumerate([math.nan, 0.5, math.nan]):
        sink.log(step, {"rollout/reward_mean": value})
    assert report_of(tmp_path).best == {"rollout/reward_mean": (1, 0.5)}


def test_the_printed_report_and_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = report_run(a_run(tmp_path))
    text = capsys.readouterr().out
    assert "4 steps, the last is step 3" in text
    row = next(line for line in text.splitlines() if "rollout/accuracy" in line)
    assert row.split() == ["rollout/accuracy", "0.200", "0.800", "0.900", "@2"]
    assert "alarm, step 2: train/grad_norm is nan, not finite." in text

    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert [row["rollout/accuracy"] for row in rows] == ["0.2", "0.7", "0.9", "0.8"]
    assert [row["eval/accuracy"] for row in rows] == ["0.2", "", "", "0.8"]
    assert written[0] == tmp_path / "curves.csv"
    if len(written) > 1:
        assert written[1].read_bytes().startswith(b"\x89PNG")


def test_a_metric_of_an_older_megarl_is_still_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(0, {"train/forgotten": 1.25})
    report_run(tmp_path)
    assert "train/forgotten" in capsys.readouterr().out


def test_a_folder_without_metrics_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: no metrics"):
        report_run(tmp_path)


def test_the_final_table_shows_before_after_time_and_where_things_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(
        "quickstart",
        before={"eval/accuracy": 0.41},
        after={"eval/accuracy": 0.93, "eval/response_length_mean": 40.0},
        seconds={"cold start": 60.0, "reinforcement learning": 180.0},
        results={"run folder": tmp_path},
    )
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["eval/accuracy", "0.410", "0.930", "+0.520"] in lines
    assert ["eval/response_length_mean", "40"] in lines
    assert ["reinforcement", "learning", "3:00", "75%"] in lines
    assert f"run folder: {tmp_path}" in text
