"""Rules between sections, each with its reason: refused before anything is loaded or started."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megarl.config.schema import Config
from megarl.errors import UserError


class Rule(NamedTuple):
    """key: where to look. broken: whether the config breaks it. reason: why it is refused and what to do."""

    key: str
    broken: Callable[[Config], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        "model.path",
        lambda c: c.model.path is None,
        "the folder of a Hugging Face checkpoint must be set",
    ),
    Rule(
        "sft.demonstrations",
        lambda c: c.sft.steps > 0 and c.sft.demonstrations is None,
        "a cold start (sft.steps) needs something to learn from: set sft.demonstrations={path: ..., preset: messages}, "
        "or sft.steps=0",
    ),
    Rule(
        "rewards.soft_overlong",
        lambda c: (c.rewards.soft_overlong or 0) > c.sampling.max_new_tokens,
        "the punishment would begin before the first token: at most sampling.max_new_tokens",
    ),
)


def check_rules(config: Config, *, where: str = "config") -> None:
    """Raises UserError for the first broken rule."""
    for rule in RULES:
        if rule.broken(config):
            raise UserError(f"{where}: {rule.key}: {rule.reason}")
