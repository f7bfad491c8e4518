"""A chat template that writes the date: data are the same on another day, and a run keeps the day it began."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from megarl.data.demonstrations import Demonstrations
from megarl.data.prompts import PromptData, open_prompts
from megarl.data.settings import DataSettings, DemonstrationSettings
from megarl.data.tokenizer import ChatTokenizer, load_tokenizer
from megarl.errors import UserError
from tests.data.templates import DATED

CHAT = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
DAYS = (datetime(2026, 1, 9), datetime(2027, 12, 31))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets transformers' clock."""

    def at(day: datetime) -> None:
        stopped = type("Stopped", (datetime,), {"now": classmethod(lambda cls, tz=None: day)})
        monkeypatch.setattr(chat_template_utils, "datetime", stopped)

    return at


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "dated.jinja").write_text(DATED)
    return tmp_path


def opened(
    rows: Path, tokenizer: ChatTokenizer, template: str = "dated.jinja", now: datetime | None = None
) -> tuple[Demonstrations, PromptData]:
    loaded = load_tokenizer(tokenizer.folder, rows / template, now=now)
    source = {"kind": "file", "path": str(rows / "rows.jsonl"), "preset": "messages", "verifier": "exact"}
    endless = {"kind": "reasoning_gym", "task": "chain_sum"}
    data = DataSettings(sources=(source, endless), heldout={"fraction": 0})
    learned = DemonstrationSettings(path=str(rows / "rows.jsonl"), preset="messages")
    return Demonstrations(learned, loaded, max_tokens=1000), open_prompts(data, loaded)


def test_data_are_those_of_the_checkpoint_on_another_day_and_not_by_another_template(rows, tokenizer, clock):
    clock(DAYS[0])
    demonstrations, prompts = opened(rows, tokenizer)
    identity, state = demonstrations.identity, prompts.stream().state_dict()
    assert "Today is 09 January 2026" in prompts.stream().next(1)[0].text
    clock(DAYS[1])
    demonstrations, prompts = opened(rows, tokenizer)
    assert "Today is 31 December 2027" in prompts.stream().next(1)[0].text
    assert demonstrations.identity == identity
    prompts.stream().load_state_dict(state)
    (rows / "other.jinja").write_text(DATED.replace("Today is", "It is"))
    demonstrations, prompts = opened(rows, tokenizer, "other.jinja")
    assert demonstrations.identity != identity
    with pytest.raises(UserError, match="the data are not those of the checkpoint: source 'rows'"):
        prompts.stream().load_state_dict(state)


def test_an_endless_source_knows_its_template(rows, tokenizer):
    (rows / "other.jinja").write_text(DATED.replace("Today is", "It is"))
    (_, one), (_, other) = (opened(rows, tokenizer, name) for name in ("dated.jinja", "other.jinja"))
    assert one.pools[1].size is None
    assert one.pools[1].identity != other.pools[1].identity


def test_a_tokenizer_that_is_told_the_date_keeps_to_it(rows, tokenizer, clock):
    clock(DAYS[1])
    demonstrations, prompts = opened(rows, tokenizer, now=DAYS[0])
    assert "Today is 09 January 2026" in prompts.stream().next(1)[0].text
    assert "09 January 2026" in tokenizer.hf.decode(demonstrations.batch(1, 1)[0].token_ids)


def test_data_may_be_moved_and_rewritten_as_they_are(rows, tokenizer, tmp_path_factory):
    demonstrations, prompts = opened(rows, tokenizer)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in rows.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    moved, same = opened(elsewhere, tokenizer)
    assert moved.identity == demonstrations.identity
    same.stream().load_state_dict(prompts.stream().state_dict())
