"""What is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.errors import UserError
from megarl.training.resolve import resolve
from tests.training.conftest import TINY


def resolved(quickstart: Path, folder: Path, *words: str) -> None:
    file = folder / "tiny.yaml"
    file.write_text(TINY.format(quickstart=quickstart))
    resolve(load_config(file, [*words]), 2)


@pytest.mark.parametrize(
    ("key", "longest", "words"),
    [
        ("sft.optimizer", 4, ["sft.steps=4"]),
        ("rl.optimizer", 12, ["rl.steps=6", "rl.minibatches=2"]),
        ("rl.optimizer", 16, ["rl.steps=1", "rl.minibatches=null", "algorithm=dapo"]),
        ("rl.critic.optimizer", 12, ["rl.steps=6", "rl.minibatches=2", "algorithm=ppo"]),
    ],
)
def test_a_warm_up_that_does_not_fit_in_its_stage_is_refused_by_its_key(
    key: str, longest: int, words: list[str], quickstart: Path, tmp_path: Path
) -> None:
    resolved(quickstart, tmp_path, *words, f"{key}.warmup_steps={longest}")
    with pytest.raises(
        UserError, match=rf"{key}\.warmup_steps={longest + 1} is more than the {longest} optimizer"
    ):
        resolved(quickstart, tmp_path, *words, f"{key}.warmup_steps={longest + 1}")


@pytest.mark.parametrize(
    "words",
    [
        ["sft.steps=0", "sft.optimizer.warmup_steps=20"],
        ["rl.steps=0", "rl.optimizer.warmup_steps=20"],
        ["rl.steps=1", "algorithm=gspo", "rl.critic.optimizer.warmup_steps=20"],
    ],
)
def test_the_warm_up_of_what_is_not_trained_does_not_matter(
    words: list[str], quickstart: Path, tmp_path: Path
) -> None:
    resolved(quickstart, tmp_path, *words)
