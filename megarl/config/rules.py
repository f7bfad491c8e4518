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
        "model",
        lambda c: (c.model.path is None) == (c.model.make is None),
        "exactly one of model.path (a checkpoint) and model.make (a model made on the spot) must be set",
    ),
    Rule(
        "model.make",
        lambda c: c.model.make is not None and "model_type" not in c.model.make,
        "model.make needs model_type, a Hugging Face model type such as qwen3_moe",
    ),
    Rule(
        "model.tokenizer",
        lambda c: c.model.make is not None and c.model.tokenizer is None,
        "a model made on the spot brings no tokenizer: set model.tokenizer to a folder or to `tiny`",
    ),
    Rule(
        "rewards.soft_overlong",
        lambda c: (c.rewards.soft_overlong or 0) > c.sampling.max_new_tokens,
        "the punishment would begin before the first token: at most sampling.max_new_tokens",
    ),
    Rule(
        "engine.urls",
        lambda c: c.engine.kind == "sglang" and bool(c.engine.urls) and c.engine.port is not None,
        "engine.port is for servers that megarl starts, engine.urls for servers that already run: set one of them",
    ),
)


def check_rules(config: Config, *, where: str = "config") -> None:
    """Raises UserError for the first broken rule."""
    for rule in RULES:
        if rule.broken(config):
            raise UserError(f"{where}: {rule.key}: {rule.reason}")
