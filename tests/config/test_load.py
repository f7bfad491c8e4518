"""A configuration is read as its user meant it, or refused in one sentence that helps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.keys import all_keys
from megarl.config.load import load_config, to_yaml
from megarl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
QUICKSTARTS = sorted((ROOT / "configs").glob("quickstart*.yaml"))
BASE = """
model: {path: some/model}
data: {sources: [{kind: reasoning_gym, task: chain_sum}]}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def refusal(path: Path, *words: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(path, words)
    return str(error.value)


@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda p: p.stem)
def test_a_shipped_configuration_reads_back_as_it_was_printed(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_words_are_laid_over_the_file_and_the_file_over_its_defaults(base: Path, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text("defaults: [base.yaml]\nrl: {steps: 7, group_size: 4}\n")
    config = load_config(tmp_path / "top.yaml", ["rl.steps=9", "rl.optimizer.lr=1e-4"])
    assert (config.rl.steps, config.rl.group_size, config.rl.optimizer.lr) == (9, 4, 1e-4)
    assert config.data.sources[0].task == "chain_sum"


@pytest.mark.parametrize("word", ["auto", "on", "off", "'on'"])
def test_a_switch_is_read_as_it_is_written(word: str, base: Path, tmp_path: Path) -> None:
    """YAML takes a bare `on` for a boolean."""
    config = load_config(base, [f"checkpoint.asynchronous={word}"])
    assert config.checkpoint.asynchronous == word.strip("'")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_another_algorithm_or_engine_starts_anew(base: Path, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text(
        "defaults: [base.yaml]\nalgorithm: {name: gspo, clip_low: 1e-4}\nengine: {kind: embedded, slots: 3}\n"
    )
    config = load_config(tmp_path / "top.yaml", ["algorithm=grpo", "engine.kind=sglang"])
    assert config.algorithm == {"name": "grpo"}
    assert config.engine.kind == "sglang"


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=grpo", "algorithm.kl=none"],
        ["algorithm.kl=none", "algorithm=grpo"],
        ["algorithm.kl=none", "algorithm.name=grpo"],
        ["algorithm={name: grpo, kl: none}"],
    ],
    ids=" ".join,
)
def test_an_algorithm_and_its_parts_are_set_in_any_order(words: list[str], base: Path) -> None:
    """Over a file that names another algorithm, as a plain word and with parts of its own."""
    for before in ("gspo", "{name: gspo, clip_low: 1e-4}"):
        base.write_text(f"{BASE}algorithm: {before}\n")
        assert load_config(base, words).algorithm == {"name": "grpo", "kl": "none"}


def test_a_part_of_an_algorithm_named_in_a_word_keeps_the_algorithm(base: Path, tmp_path: Path) -> None:
    base.write_text(f"{BASE}algorithm: gspo\n")
    changed = {"name": "gspo", "clip_low": 1e-4}
    assert load_config(base, ["algorithm.clip_low=1e-4"]).algorithm == changed
    (tmp_path / "top.yaml").write_text("defaults: [base.yaml]\nalgorithm: {clip_low: 1.0e-4}\n")
    assert load_config(tmp_path / "top.yaml").algorithm == changed


def test_an_engine_and_its_settings_are_set_in_any_order(base: Path) -> None:
    for words in (["engine.kind=sglang", "engine.port=7"], ["engine.port=7", "engine.kind=sglang"]):
        assert load_config(base, words).engine.port == 7
    assert load_config(base, ["engine.slots=3"]).engine.slots == 3  # of the default kind
    base.write_text(f"{BASE}engine: {{kind: embedded, slots: 3}}\n")
    assert load_config(base, ["engine={kind: sglang}"]).engine.kind == "sglang"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("rl.stps=3", "unknown key 'rl.stps'. Did you mean 'steps'?"),
        ("rl.steps=many", "rl.steps: input should be a valid integer"),
        ("rl.steps=-1", "rl.steps: input should be greater than or equal to 0"),
        ("engine.kind=vllm", "the key 'engine.kind' is 'vllm', it must be one of embedded, sglang"),
        ("rl=3", "rl: input should be a valid dictionary"),
        ("steps", "an override is written key.sub=value"),
        ("model.path=null", "model.path: the folder of a Hugging Face checkpoint must be set"),
        ("sft.steps=3", "sft.demonstrations: a cold start (sft.steps) needs something to learn from"),
        ("data.sources.0.tsk=x", "unknown key 'data.sources.0.tsk'. Did you mean 'task'?"),
        (
            "data.sources.0.reference.tests=x",
            "unknown key 'data.sources.0.reference'. Did you mean 'ground_truth'?",
        ),
        ("data.sources.0.kind=x", "'data.sources.0.kind' is 'x', it must be one of file, reasoning_gym"),
        ("data.evaluations.aime.path=x", "the key 'data.evaluations.aime.kind' is missing"),
        (
            "data.evaluations.aime={kind: file, path: x, prest: x}",
            "'data.evaluations.aime.prest'. Did you mean",
        ),
        ("engine.urls=[x]", "the key 'engine.urls' belongs to engine.kind=sglang"),
        ("engine.solts=3", "unknown key 'engine.solts'. Did you mean 'slots'"),
        ("rl.optimizer.lr=.inf", "rl.optimizer.lr: input should be a finite number"),
        ("sampling.top_k=0", "sampling.top_k: 0 keeps no token"),
        ("name=..", "name: string should match"),
        (
            "parallel.virtual_pipeline=2",
            "parallel.virtual_pipeline: a virtual pipeline needs parallel.pipeline > 1",
        ),
        ("rl.optimizer.min_lr=1", "rl.optimizer.min_lr: min_lr 1 is above lr 1e-06: lower it, too"),
        ("log.sinks=[jsnl]", "log.sinks.0: input should be 'jsonl', 'console', 'tensorboard' or 'wandb'"),
        (
            "alarms.rules=[{metric: train/lr, when: above}]",
            "alarms.rules.0: 'above' and 'below' need a threshold",
        ),
        (
            "data.evaluations.file={kind: file, path: x, prest: x}",
            "'data.evaluations.file.prest'. Did you mean",
        ),
        (
            "data.evaluations.path={kind: file, path: x, prest: x}",
            "'data.evaluations.path.prest'. Did you mean",
        ),
    ],
)
def test_a_mistake_is_told_with_its_key_and_what_to_do(base: Path, word: str, told: str) -> None:
    assert told in refusal(base, word)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1", "must hold keys and values"),
        ("defaults: other.yaml", "`defaults` must be a list"),
        ("defaults: [self.yaml]", "its defaults lead back to it"),
        ("defaults: 5", "`defaults` must be a list"),
        ("defaults:", "`defaults` must be a list"),
        ("5", "cannot be read as YAML"),
        ("defaults: [base.yaml]\nmodel: [1]", "self.yaml: does not fit what its defaults say"),
        ("defaults: [base.yaml]\nname: ${nowhere}", "Interpolation key 'nowhere' not found"),
        ("defaults: [base.yaml/x]", "base.yaml/x: cannot be read as YAML (Not a directory)"),
        ("defaults: [nowhere.yaml]", "nowhere.yaml: no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(base: Path, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "self.yaml"
    path.write_text(text)
    assert told in refusal(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml: no such file" in refusal(tmp_path / "nowhere.yaml")


def test_reading_a_configuration_imports_neither_torch_nor_an_engine() -> None:
    code = "import sys, megarl.config.load; sys.exit(bool({'torch', 'megatron.core', 'sglang'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


EVERY_PATH = """
folder: {0}
model: {{path: {0}, tokenizer: {0}, chat_template: {0}}}
data:
  sources: [{{kind: file, path: {0}, preset: gsm8k}}]
  evaluations: {{other: {{kind: file, path: {0}, preset: gsm8k}}}}
sft: {{demonstrations: {{path: {0}}}}}
engine: {{kind: sglang, python: {0}, args: {{tokenizer_path: {0}}}}}
"""
PATH_NAMES = {"path", "folder", "file", "python", "tokenizer", "chat_template"}


def values(config: Any) -> Iterator[str]:
    """Every text in a configuration."""
    if isinstance(config, str):
        yield config
    elif isinstance(config, dict | list | tuple):
        for part in config.values() if isinstance(config, dict) else config:
            yield from values(part)


def test_every_path_may_begin_at_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key for key in all_keys() if key.is_path]
    assert {key.leaf for key in all_keys()} & PATH_NAMES == {key.leaf for key in keys}
    monkeypatch.setenv("HOME", "/homes/me")
    (tmp_path / "run.yaml").write_text(EVERY_PATH.format("'~/there'"))
    found = [value for value in values(load_config(tmp_path / "run.yaml").model_dump()) if "there" in value]
    assert found == ["/homes/me/there"] * (len(keys) + 1)  # and one of the engine's own arguments


@pytest.mark.parametrize("key", ["folder", "model.path", "model.tokenizer", "sft.demonstrations.path"])
def test_a_home_that_nobody_has_is_refused_by_its_key(key: str, base: Path) -> None:
    assert f"{key}: '~nobody-is-called-so/x': there is no such home" in refusal(
        base, f"{key}=~nobody-is-called-so/x"
    )


def test_a_file_and_its_defaults_may_lie_in_a_home(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base.parent))
    (base.parent / "top.yaml").write_text("defaults: ['~/base.yaml']\n")
    assert load_config("~/top.yaml").model.path == "some/model"
