"""`metrics.jsonl`: nothing twice, nothing lost, whatever killed the run before."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.monitor.jsonl import JsonlSink, encode_line, read_metrics
from megarl.monitor.metrics import default_registry
from tests.disk import full_disk


def write(path: Path, steps: range, *, resume_at: int | None = None, tag: float = 0.0) -> None:
    sink = JsonlSink(path, resume_at=resume_at)
    for step in steps:
        sink.log(step, {"rollout/reward_mean": step + tag, "perf/step_time": 1.5})
    sink.close()


def test_identical_steps_give_identical_lines_whatever_the_order_of_the_metrics() -> None:
    one = encode_line(3, {"train/lr": 1e-6, "rollout/tokens": 8})
    other = encode_line(3, {"rollout/tokens": 8.0, "train/lr": 0.000001})
    assert one == other == b'{"rollout/tokens": 8.0, "step": 3, "train/lr": 1e-06}\n'


def test_timings_are_what_two_identical_runs_may_differ_in() -> None:
    names = ("perf/step_time", "sync/seconds", "perf/train_seconds", "train/lr")
    assert [name for name in names if not default_registry()[name].timing] == ["train/lr"]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["a/b", "c/d", "e/f"]), st.floats()))
def test_every_number_comes_back_exactly_and_every_line_is_valid_json(metrics: dict[str, float]) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(encode_line(0, metrics), parse_constant=refuse)
    assert row.pop("step") == 0
    assert row.keys() == metrics.keys()
    for name, value in metrics.items():
        assert float(row[name]) == value or (math.isnan(float(row[name])) and math.isnan(value))


@settings(max_examples=60, deadline=None)
@given(written=st.integers(1, 6), resume_at=st.integers(0, 6), cut=st.integers(0, 120))
def test_a_resumed_run_has_every_step_once_wherever_the_first_was_cut(
    tmp_path_factory: pytest.TempPathFactory, written: int, resume_at: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write(path, range(written))
    before = path.read_bytes()
    path.write_bytes(before[: max(0, len(before) - cut)])
    whole = [step for step, _ in read_metrics(path)]
    resume_at = min(resume_at, len(whole))

    write(path, range(resume_at, 8), resume_at=resume_at, tag=0.5)

    rows = list(read_metrics(path))
    assert [step for step, _ in rows] == list(range(8))
    assert path.read_bytes().count(b"\n") == 8
    for step, metrics in rows:
        assert metrics["rollout/reward_mean"] == step + (0.5 if step >= resume_at else 0.0)
    kept = b"".join(before.splitlines(keepends=True)[:resume_at])
    assert path.read_bytes().startswith(kept), "earlier lines stay as they were, byte for byte"


def test_after_kill_9_every_line_that_log_returned_from_is_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys, itertools\n"
        "from pathlib import Path\n"
        "from megarl.monitor.jsonl import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "for step in itertools.count():\n"
        "    sink.log(step, {'train/lr': 1.0})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while int(process.stdout.readline()) < 20:
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    returned = 20 + len(process.stdout.read().split())
    process.stdout.close()

    steps = [step for step, _ in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= returned


def test_a_new_run_refuses_the_file_of_another_and_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(2))
    before = path.read_bytes()
    with pytest.raises(UserError, match="already holds the metrics of a run"):
        JsonlSink(path)
    assert path.read_bytes() == before


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(0, {})
    with pytest.raises(ValueError, match="step 0 was logged after step 0"):
        sink.log(0, {})


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        JsonlSink(path, resume_at=3)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        list(read_metrics(path))


def test_an_unwritable_folder_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be (read|written)"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


def test_a_full_disk_leaves_only_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(0, {"train/lr": 1.0})
    with full_disk(path.stat().st_size + 10), pytest.raises(UserError, match="cannot be written"):
        sink.log(1, {"train/lr": 1.0})
    assert path.read_text() == '{"step": 0, "train/lr": 1.0}\n'
    sink.log(1, {"train/lr": 1.0})
    assert [step for step, _ in read_metrics(path)] == [0, 1], (
        "and the step can be logged again once there is room"
    )
