"""What the quickstart starts from: demonstrations of its own training questions, right and in the intended shares; a
tokenizer that spells everything; made once, again only when something changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart.make import (
    QUICKSTART,
    build_tokenizer,
    demonstrate,
    make_files,
    open_questions,
    training_questions,
)
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.data.demonstrations import Demonstrations
from megarl.data.prompts import open_prompts
from megarl.data.questions import Question
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.training.check import check_run
from tests.models import SMALL

ROOT = Path(__file__).resolve().parents[2]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]


def test_the_first_training_questions_are_demonstrated_and_learned_as_the_run_would_ask_them(
    quickstart: Path,
) -> None:
    config = load_config(quickstart)
    tokenizer = load_tokenizer(config.model.path)
    (source,) = config.data.sources
    first = config.data.model_copy(update={"sources": (source.model_copy(update={"start": 0}),)})
    prompts = open_prompts(first, tokenizer).stream().next(64)
    answers = [row["messages"][-1]["content"] for row in rows_of(quickstart.parent)]
    learned = Demonstrations(config.sft.demonstrations, tokenizer, max_tokens=256).batch(1, 64)
    for prompt, answer, sequence in zip(prompts, answers, learned, strict=True):
        said = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        assert sequence.token_ids.tolist() == [*prompt.token_ids, *said]
        assert sequence.loss_mask.tolist() == [False] * len(prompt.token_ids) + [True] * len(said)
        assert answer.endswith(f"Answer: {prompt.ground_truth['entry']['answer']}")


def test_rl_begins_behind_the_questions_that_were_demonstrated() -> None:
    config = load_config(QUICKSTART)
    assert config.data.sources[0].start == config.sft.steps * config.sft.batch_size


def test_other_questions_are_demonstrated_where_others_are_held_out() -> None:
    asked = []
    for salt in ("one", "other"):
        config = load_config(QUICKSTART, [f"data.heldout.salt={salt}"])
        questions = training_questions(config, open_questions(config))
        asked.append([question.question_id for question in islice(questions, 100)])
    assert asked[0] != asked[1]


def test_demonstrations_are_right_and_come_in_the_intended_shares() -> None:
    entry = {"answer": "8", "metadata": {"expression": "4 - 1 - 7 + 12"}}
    said = Counter(demonstrate(Question(f"p/{n}", (), "", "", {"entry": entry}), 0) for n in range(3000))
    assert said.pop("Answer: 8") == pytest.approx(1140, abs=120)
    assert set(said) == {f"{opening}4-1=3-7=-4+12=8\nAnswer: 8" for opening in ("", "Work: ", "Sum: ")}
    assert all(number == pytest.approx(620, abs=90) for number in said.values())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    words = ["sft.steps=1", "sft.batch_size=4", f"model.path={tmp_path}/model"]
    return load_config(QUICKSTART, [*words, f"sft.demonstrations.path={tmp_path}/demonstrations.jsonl"])


def test_files_are_made_once_and_again_when_something_changes(config: Config, tmp_path: Path) -> None:
    make_files(config, SMALL, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in files}
    assert all("up to date" in line for line in make_files(config, SMALL, tmp_path))
    assert times == {path: path.stat().st_mtime_ns for path in files}
    (tmp_path / "demonstrations.jsonl").unlink()
    make_files(config, SMALL, tmp_path)
    assert files == {path: path.read_bytes() for path in files}
    make_files(config.model_copy(update={"seed": 1}), SMALL, tmp_path)
    changed = {path.name for path, content in files.items() if path.read_bytes() != content}
    assert changed == {"model.safetensors", "demonstrations.jsonl", "made.json"}


def test_what_lies_elsewhere_is_left_alone(config: Config, tmp_path: Path) -> None:
    said = make_files(config, SMALL, tmp_path / "files")
    assert len(said) == 2
    assert all("left as it is" in line for line in said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "fields", "told"),
    [
        (["data.sources.0.task=gcd", "data.sources.0.params={}"], {}, "the task chain_sum"),
        (["data.sources.0={kind: reasoning_gym, task: chain_sum, size: 9, start: 0}"], {}, "one endless"),
        ([], {"model_type": "qwen9"}, "qwen9"),
        ([], {"hidden_sise": 3}, "Did you mean 'hidden_size'"),
    ],
)
def test_what_cannot_be_made_is_told(words: list[str], fields: dict, told: str, tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [*words, f"model.path={tmp_path}/model"])
    with pytest.raises(UserError, match=told):
        make_files(config, fields, tmp_path)


def test_a_missing_file_is_told_with_what_makes_it(quickstart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "toy"
    folder.mkdir(parents=True)
    (folder / "make.py").touch()
    for key in ("model.path", "sft.demonstrations.path"):
        with pytest.raises(UserError) as caught:
            check_run(load_config(quickstart, [f"{key}={folder}/files/it"]), 2)
        assert str(caught.value).startswith(f"{key}: {folder}/files/it: no such f")
        assert str(caught.value).endswith(f" `python {folder}/make.py` makes it.")
    with pytest.raises(UserError, match=r"/nowhere: no such folder\.$"):
        check_run(load_config(quickstart, ["model.path=/nowhere"]), 2)


def test_every_digit_and_every_byte_is_a_token_and_transformers_loads_the_files(quickstart: Path) -> None:
    folder = quickstart.parent / "model"
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("0123456789")) == 10
    entries = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len([entry for entry in entries if len(entry) == 1]) == 256
    hf = AutoTokenizer.from_pretrained(folder)
    assert (hf.pad_token_id, hf.eos_token, hf.eos_token_id) == (0, "<|im_end|>", 2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(hf) == tokenizer.vocab_size <= 384
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


BUILD = """
import sys
from examples.quickstart.make import build_tokenizer
words = ("ab", "ba", "cd")
build_tokenizer(sys.argv[1], [f"What is {i} times {i + 1}, or {word}?" for i in range(500) for word in words])
"""


def test_each_build_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    env = {
        "PATH": "",
        "RAYON_NUM_THREADS": "4",
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    elsewhere, here = tmp_path / "else where", tmp_path / "here"
    subprocess.run([sys.executable, "-c", BUILD, elsewhere], check=True, env=env, capture_output=True)
    exec(BUILD.replace("sys.argv[1]", repr(str(here))), {})
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(f.name for f in elsewhere.iterdir()) == names
    assert [(elsewhere / n).read_bytes() for n in names] == [(here / n).read_bytes() for n in names]


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 259"):
        build_tokenizer(tmp_path, ["a"], vocab_size=258)
