"""Every key of the configuration is explained: by `megarl config explain`, and in docs/config.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.docs import render
from megarl.config.keys import all_keys, describe_key
from megarl.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_of_all_keys_is_what_the_schema_says() -> None:
    """A new key, default or bound is a decision."""
    assert PAGE.read_text() == render(), "run `python -m megarl.config.docs`"


def test_every_key_says_what_it_means() -> None:
    for key in all_keys():
        assert (key.field.description or "").endswith("."), key
        assert describe_key(".".join(key.path)), key


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("sft.optimizer.lr", "(default 0.001)"),  # in its place: another than that of rl.optimizer.lr
        ("rl.optimizer.lr", "(default 1e-06)"),
        ("model.recompute", "One of 'none', 'selective', 'full'."),
        ("log.sinks", "One of 'jsonl', 'console', 'tensorboard', 'wandb'."),
        ("engine.kind", "engine.kind='sglang': "),
        ("data.sources.0.task", "Name of the task"),  # as an error message would call it
        ("data.evaluations.aime.path", "A file, a folder"),
        ("data.evaluations.path", "A file, a folder"),
        ("rl", "\n  group_size: Responses per prompt."),
    ],
)
def test_a_key_is_explained_where_it_stands(key: str, told: str) -> None:
    assert told in describe_key(key)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("modle.path", "unknown key 'modle'. Did you mean 'model'"),
        ("rl.grup_size", "Did you mean 'group_size'"),
        ("algorithm.clip_low", "`megarl algorithms NAME`"),
        ("model.transformer.num_layers", "model.transformer has no keys of megarl's own"),
        ("nope", "Known there: alarms, algorithm"),
    ],
)
def test_a_key_that_is_none_is_told_with_what_there_is(key: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        describe_key(key)
    assert told in str(caught.value)
