"""The benchmarks run, on the smallest sizes, and print what they promise. Their figures are in docs/results/."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "logprobs --tokens 64 --hidden-size 8 --vocabulary 128 --chunk 16 --turns 2",
            ["plain", "chunked", "MiB"],
        ),
        (
            "replay --size tiny --turns 2 --memory-steps 2",
            ["recompute + R2", "recompute + R3", "resident memory"],
        ),
        ("logprob_source --size tiny --turns 2", ["the engine's log-probabilities save"]),
        ("checkpoint --layers 1 --turns 2", ["torch.save", "save behind", "of it waited"]),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_benchmark_prints_its_table(
    words: str,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *options = words.split()
    monkeypatch.syspath_prepend(str(FOLDER))  # as for a script that is run by its path
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert all(word in shown for word in told), shown
