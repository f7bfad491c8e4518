"""Alarms: rules over metrics, as data. A rule says what is wrong, for how long, and what to do about it.

An alarm is told when its condition has held for `patience` logged values in a row, and again only after the
metric has been well in between. What an alarm saw is part of a checkpoint, so that a resumed run alarms as an
unbroken one would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.errors import UserError
from megarl.monitor.console import number
from megarl.monitor.registry import Registry
from megarl.monitor.settings import AlarmRule


@dataclass(frozen=True)
class Alarm:
    """A rule that has been broken for as long as its patience allows."""

    rule: AlarmRule
    step: int
    value: float

    def __str__(self) -> str:
        """`step 12: train/grad_norm is 310, above 100 for 3 steps. Lower train.lr.`"""
        rule = self.rule
        what = "not finite" if rule.threshold is None else f"{rule.when} {number(rule.threshold)}"
        long = f" for {rule.patience} steps" if rule.patience > 1 else ""
        return (
            f"step {self.step}: {rule.metric} is {number(self.value)}, {what}{long}. {rule.advice}".rstrip()
        )


class AlarmStop(UserError):
    """A rule whose action is `stop` was broken."""


class AlarmWatch:
    """Follows the rules over the steps of a run."""

    def __init__(self, rules: Iterable[AlarmRule], registry: Registry) -> None:
        """Raises UnregisteredMetric for a rule about a metric that nothing logs: it would never ring."""
        self._rules = tuple(rules)
        for rule in self._rules:
            _ = registry[rule.metric]
        self._held: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, float]) -> tuple[Alarm, ...]:
        """Return the alarms that ring at this step. A metric that the step doesn't have changes nothing."""
        seen = [(rule, metrics[rule.metric]) for rule in self._rules if rule.metric in metrics]
        for key, holds in {rule.key(): rule.holds(value) for rule, value in seen}.items():
            self._held[key] = self._held.get(key, 0) + 1 if holds else 0
        return tuple(
            Alarm(rule, step, value) for rule, value in seen if self._held[rule.key()] == rule.patience
        )

    def state(self) -> dict[str, int]:
        """For a checkpoint: how long each rule has been broken."""
        return dict(self._held)

    def restore(self, state: Mapping[str, int]) -> None:
        """From a checkpoint. Rules that are new since then start afresh."""
        self._held = {rule.key(): state[rule.key()] for rule in self._rules if rule.key() in state}


def stop_if_told(alarms: Iterable[Alarm]) -> None:
    """Raises AlarmStop, naming every alarm whose action is `stop`, if there is one."""
    stopping = [str(alarm) for alarm in alarms if alarm.rule.action == "stop"]
    if stopping:
        raise AlarmStop("training stopped by an alarm: " + " ".join(stopping))


DEFAULT_RULES: tuple[AlarmRule, ...] = (
    *(
        AlarmRule(
            metric=metric,
            when="not_finite",
            action="stop",
            advice="Resume from the last checkpoint with a lower learning rate; look at this step's samples.",
        )
        for metric in ("train/grad_norm", "train/loss")
    ),
    AlarmRule(
        metric="sft/loss",
        when="not_finite",
        action="stop",
        advice="Lower the learning rate, and look for empty or corrupted demonstrations.",
    ),
    AlarmRule(
        metric="train/grad_norm",
        when="above",
        threshold=100.0,
        patience=3,
        advice="The update is far larger than usual: lower the learning rate or the gradient clip.",
    ),
    AlarmRule(
        metric="train/entropy",
        when="below",
        threshold=0.01,
        patience=5,
        advice="The policy hardly explores any more: raise clip_high, or add harder prompts.",
    ),
    AlarmRule(
        metric="mismatch/k3",
        when="above",
        threshold=0.01,
        patience=3,
        advice="Engine and trainer disagree about the same tokens: check precision and weight sync, and "
        "consider routing replay for a MoE policy.",
    ),
    AlarmRule(
        metric="rollout/truncated_share",
        when="above",
        threshold=0.5,
        patience=3,
        advice="Most responses hit the token budget: raise it, or penalise overlong responses.",
    ),
    AlarmRule(
        metric="rollout/groups_kept",
        when="below",
        threshold=1.0,
        patience=3,
        advice="No group is left to train on: prompts too easy, too hard, or without a scored response.",
    ),
    AlarmRule(
        metric="rollout/unscored",
        when="above",
        threshold=0.0,
        patience=3,
        advice="Verifiers keep failing: the reasons are in the samples of this step, under unscored_reason.",
    ),
)
