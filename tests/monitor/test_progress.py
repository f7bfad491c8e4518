"""Progress in a log file and on a terminal."""

import io

import pytest
from rich.console import Console

from megarl.monitor.progress import duration, progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def log_file() -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, width=200)


def test_a_log_file_gets_a_line_an_interval_with_rate_and_time_left() -> None:
    clock, (stream, console) = Clock(), log_file()
    with progress("Generating", 100, unit="responses", console=console, interval=15, clock=clock) as bar:
        for _ in range(100):
            clock.now += 1
            bar.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Generating: 15/100 responses (15%), 1.0 responses/s, 1:25 left"
    assert lines[-1] == "Generating: 100 responses in 1:40, 1.0 responses/s"
    assert len(lines) == 7


def test_a_short_phase_says_nothing_in_a_log_file_unless_it_is_announced() -> None:
    clock, (stream, console) = Clock(), log_file()
    with progress("Scoring", 2, console=console, clock=clock) as bar:
        bar.advance(2)
    assert stream.getvalue() == ""
    with progress("Building the model", console=console, clock=clock, announce=True):
        clock.now += 2
    assert stream.getvalue() == "Building the model: done in 2.0 s\n"


def test_a_rank_that_does_not_speak_prints_nothing() -> None:
    stream, console = log_file()
    with progress("Scoring", 2, console=console, enabled=False, announce=True, interval=0) as bar:
        bar.advance(2)
        bar.update(description="Scored")
    assert stream.getvalue() == ""


def test_a_phase_without_a_total_tells_its_count_and_takes_another_name() -> None:
    clock, (stream, console) = Clock(), log_file()
    with progress("Loading", unit="tensors", console=console, interval=1, clock=clock) as bar:
        clock.now += 4
        bar.advance(2)
        bar.update(description="Loaded")
    assert stream.getvalue().splitlines() == [
        "Loading: 2 tensors, 2.0 s/tensor",
        "Loaded: 2 tensors in 4.0 s, 2.0 s/tensor",
    ]


def test_a_terminal_shows_a_bar_that_is_gone_afterwards() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, legacy_windows=False)
    with progress("Generating", 4, unit="responses", console=console) as bar:
        bar.advance(4)
    shown = stream.getvalue()
    assert "4/4 responses" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased at the end"


def test_a_failing_phase_raises_and_does_not_claim_to_be_done() -> None:
    stream, console = log_file()
    with pytest.raises(KeyError), progress("Loading", console=console, announce=True):
        raise KeyError("x")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1:00"), (187, "3:07"), (7387, "2:03:07")],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_bars_nest_and_a_line_printed_meanwhile_stays() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, legacy_windows=False)
    with progress("Training", 2, unit="steps", console=console) as outer:
        for step in range(2):
            with progress("Generating", 4, unit="responses", console=console) as inner:
                inner.advance(4)
            console.print(f"step {step}", highlight=False)
            outer.advance()
    shown = stream.getvalue()
    assert "Generating" in shown
    assert "2/2 steps" in shown
    assert "step 0\n" in shown
    assert "step 1\n" in shown
