"""The metric registry: names, lookups, and the page made from it."""

from pathlib import Path

import numpy as np
import pytest

from megarl.monitor.docs import render
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import MetricSpec, Registry, UnregisteredMetric
from megarl.records import Group, Prompt, Sample, WeightSpan
from megarl.rollout.sampling import merge_counts, rollout_counts

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_metrics_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text() == render(default_registry()), "run `python -m megarl.monitor.docs`"


def test_a_mistyped_name_is_refused_with_the_right_one() -> None:
    with pytest.raises(UnregisteredMetric, match=r"'train/pg_los' is not registered.*'train/pg_loss'"):
        _ = default_registry()["train/pg_los"]


def test_a_placeholder_stands_for_exactly_one_path_element() -> None:
    registry = default_registry()
    assert registry["eval/gsm8k-test/accuracy"].name == "eval/{dataset}/accuracy"
    assert "eval/a/b/accuracy" not in registry
    assert "eval//accuracy" not in registry
    assert "eval/{dataset}/accuracy" not in registry, "a template is not a name"


def test_an_exact_row_wins_over_a_template() -> None:
    exact = MetricSpec("a/b/c", "exact", "1")
    registry = Registry([MetricSpec("a/{x}/c", "template", "1"), exact])
    assert registry["a/b/c"] is exact


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        Registry([MetricSpec("a/b", "one", "1"), MetricSpec("a/b", "two", "1")])


@pytest.mark.parametrize("name", ["loss", "Train/loss", "train/", "train/a b", "step", "/loss"])
def test_a_name_has_a_room_and_a_word(name: str) -> None:
    with pytest.raises(ValueError):
        MetricSpec(name, "meaning", "1")


def test_everything_in_seconds_or_per_second_is_marked_as_a_timing() -> None:
    """Otherwise two identical runs would seem to differ."""
    for metric in default_registry():
        if metric.unit in ("s", "tokens/s") or metric.name.startswith("perf/") or "seconds" in metric.name:
            assert metric.timing, metric.name


def test_no_two_metrics_of_a_line_share_a_short_name() -> None:
    shown = [m.console for m in default_registry() if m.console and not m.name.startswith("sft/")]
    assert len(shown) == len(set(shown))


def test_every_number_a_round_of_rollouts_reports_is_registered() -> None:
    prompt = Prompt("sum/0", np.array([5]), "1 + 1 = ?", "exact", {"answer": "2"})
    sample = Sample(
        prompt, "sum/0/0", np.array([7]), np.zeros(1), np.ones(1), "stop", (WeightSpan(0, 0, 1),), reward=1.0
    )
    counts = rollout_counts([Group(prompt, (sample,))])
    for name in merge_counts([counts], "rollout"):
        _ = default_registry()[name]
