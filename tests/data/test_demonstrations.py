"""Demonstrations from files: one order for any number of replicas and any restart, every row once an epoch. Those made
on the spot: right, and in the asked shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megarl.data.demonstrations import Demonstrations, FileDemonstrations, shows_work
from megarl.data.settings import DemonstrationSettings
from megarl.errors import UserError
from megarl.records import Prompt


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"say {i}"}]}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, tokenizer, *, max_tokens: int = 1000, **settings) -> FileDemonstrations:
    made = DemonstrationSettings(**{"path": str(path), "preset": "messages", **settings})
    return FileDemonstrations(made, tokenizer, seed=3, max_tokens=max_tokens)


def learned(tokenizer, sequences) -> list[str]:
    return [tokenizer.decode(s.token_ids[s.loss_mask]) for s in sequences]


def test_every_row_is_learned_once_an_epoch_in_an_order_of_its_own(chats, tokenizer):
    made = opened(chats, tokenizer)
    epochs = [learned(tokenizer, made.batch(step, 10)) for step in (1, 2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"say {i}" for i in range(10)]
    assert epochs[0] != epochs[1] != sorted(epochs[0])


def test_replicas_share_a_step_out_and_a_restart_goes_on_where_it_was(chats, tokenizer):
    made = opened(chats, tokenizer)
    for step in (1, 2, 3):
        shares = [learned(tokenizer, made.batch(step, 2, replica, 2)) for replica in (0, 1)]
        assert shares[0] + shares[1] == learned(tokenizer, opened(chats, tokenizer).batch(step, 4))


def test_a_response_column_is_learned_like_a_conversation(tmp_path, tokenizer):
    path = tmp_path / "answers.csv"
    path.write_text("ask,reply\nwhat?,that\n")
    columns = {"question": "ask", "response": "reply"}
    made = opened(path, tokenizer, preset=None, columns=columns)
    assert learned(tokenizer, made.batch(1, 1)) == ["that"]


def test_what_exceeds_the_models_context_is_left_out_and_counted(chats, tokenizer):
    long = {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y"}]}
    chats.write_text(chats.read_text() + json.dumps(long) + "\n")
    made = opened(chats, tokenizer, max_tokens=100)
    assert made.tally.counts == {"rows": 11, "overlong": 1, "train": 10}
    with pytest.raises(UserError, match=r"row 11: .* tokens, max_tokens is 100"):
        opened(chats, tokenizer, max_tokens=100, overlong="error")


def test_a_file_without_demonstrations_is_an_error_that_names_it(tmp_path, tokenizer):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(UserError, match=r"questions\.jsonl, row 1"):
        opened(path, tokenizer)


def test_made_demonstrations_are_right_and_come_in_the_asked_shares(tokenizer):
    made = Demonstrations(tokenizer, worked_share=0.6, openings=("", "Work: ", "Sum: "), seed=0)
    entry = {"answer": "8", "metadata": {"expression": "4 - 1 - 7 + 12"}}
    ground_truth = {"dataset": "chain_sum", "entry": entry}
    said = Counter(made.response(Prompt(f"p/{n}", [1], "", "", ground_truth)) for n in range(3000))
    direct = said.pop("Answer: 8")
    assert direct == pytest.approx(1200, abs=120)
    assert not shows_work("Answer: 8")
    assert set(said) == {f"{opening}4-1=3-7=-4+12=8\nAnswer: 8" for opening in ("", "Work: ", "Sum: ")}
    assert all(shows_work(text) and count == pytest.approx(600, abs=90) for text, count in said.items())
