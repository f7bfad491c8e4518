"""Alarms: rung once, after their patience, and the same in a resumed run."""

import math

import pytest

from megarl.errors import UserError
from megarl.monitor.alarms import DEFAULT_RULES, AlarmStop, AlarmWatch, stop_if_told
from megarl.monitor.metrics import default_registry
from megarl.monitor.registry import UnregisteredMetric
from megarl.monitor.settings import AlarmRule

HIGH = AlarmRule(
    metric="train/grad_norm", when="above", threshold=10.0, patience=2, advice="Lower the learning rate."
)


def steps_that_ring(watch: AlarmWatch, values: list[float | None], start: int = 0) -> list[int]:
    rung = []
    for step, value in enumerate(values, start):
        rung += [a.step for a in watch.check(step, {} if value is None else {"train/grad_norm": value})]
    return rung


def test_an_alarm_rings_once_when_its_patience_ends_and_again_only_after_it_was_well() -> None:
    watch = AlarmWatch([HIGH], default_registry())
    assert steps_that_ring(watch, [11, 9, 11, 11, 11, 11, 9, 11, 11]) == [3, 8]


def test_rules_that_share_a_condition_each_ring_when_their_own_patience_ends() -> None:
    """As when a user asks a default rule to stop the run, too."""
    stops = AlarmRule(metric="train/grad_norm", when="above", threshold=10.0, patience=4, action="stop")
    watch = AlarmWatch([HIGH, stops], default_registry())
    assert steps_that_ring(watch, [11] * 6) == [1, 3]


def test_a_step_without_the_metric_neither_counts_nor_resets() -> None:
    assert steps_that_ring(AlarmWatch([HIGH], default_registry()), [11, None, None, 11]) == [3]


def test_a_resumed_run_rings_where_an_unbroken_one_does() -> None:
    values: list[float | None] = [11, 11, 11, 9, 11, 11]
    whole = steps_that_ring(AlarmWatch([HIGH], default_registry()), values)
    for cut in range(len(values)):
        first, second = AlarmWatch([HIGH], default_registry()), AlarmWatch([HIGH], default_registry())
        rung = steps_that_ring(first, values[:cut])
        second.restore(first.state())
        assert rung + steps_that_ring(second, values[cut:], start=cut) == whole


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stops_training_with_advice(value: float) -> None:
    watch = AlarmWatch(DEFAULT_RULES, default_registry())
    with pytest.raises(AlarmStop, match=r"step 4: train/grad_norm is \S+, not finite\. Resume") as stop:
        stop_if_told(watch.check(4, {"train/grad_norm": value}))
    assert isinstance(stop.value, UserError), "one message, no traceback"


def test_nan_is_neither_above_nor_below() -> None:
    assert not AlarmRule(metric="train/lr", when="above", threshold=0.0).holds(math.nan)
    assert not AlarmRule(metric="train/lr", when="below", threshold=0.0).holds(math.nan)


def test_a_warning_does_not_stop() -> None:
    watch = AlarmWatch([HIGH], default_registry())
    watch.check(0, {"train/grad_norm": 11})
    (alarm,) = watch.check(1, {"train/grad_norm": 310})
    stop_if_told([alarm])
    assert str(alarm) == "step 1: train/grad_norm is 310, above 10 for 2 steps. Lower the learning rate."


def test_a_rule_about_a_metric_nobody_logs_is_refused() -> None:
    with pytest.raises(UnregisteredMetric, match="train/grad_nrom"):
        AlarmWatch([AlarmRule(metric="train/grad_nrom", when="above", threshold=1.0)], default_registry())


def test_a_threshold_is_given_exactly_where_it_means_something() -> None:
    with pytest.raises(ValueError, match="threshold"):
        AlarmRule(metric="train/lr", when="above")
    with pytest.raises(ValueError, match="threshold"):
        AlarmRule(metric="train/lr", when="not_finite", threshold=1.0)


def test_a_well_going_run_rings_no_default_alarm() -> None:
    healthy = {
        "train/grad_norm": 0.8,
        "train/loss": 0.0,
        "train/entropy": 0.9,
        "mismatch/k3": 1.5e-3,
        "rollout/truncated_share": 0.02,
        "rollout/groups_kept": 30.0,
        "rollout/unscored": 0.0,
        "sft/loss": 0.5,
    }
    assert {rule.metric for rule in DEFAULT_RULES} <= healthy.keys()
    watch = AlarmWatch(DEFAULT_RULES, default_registry())
    assert [a for step in range(10) for a in watch.check(step, healthy)] == []
