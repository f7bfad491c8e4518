"""Demonstrations: one order for any number of replicas and any restart, every row once an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.data.demonstrations import Demonstrations
from megarl.data.settings import DemonstrationSettings
from megarl.errors import UserError


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"say {i}"}]}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, tokenizer, *, max_tokens: int = 1000, **settings) -> Demonstrations:
    made = DemonstrationSettings(**{"path": str(path), "preset": "messages", "seed": 3, **settings})
    return Demonstrations(made, tokenizer, max_tokens=max_tokens)


def learned(tokenizer, sequences) -> list[str]:
    return [tokenizer.decode(s.token_ids[s.loss_mask]) for s in sequences]


def test_every_row_is_learned_once_an_epoch_in_an_order_of_its_own(chats, tokenizer):
    made = opened(chats, tokenizer)
    epochs = [learned(tokenizer, made.batch(step, 10)) for step in (1, 2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"say {i}" for i in range(10)]
    assert epochs[0] != epochs[1] != sorted(epochs[0])


def test_rows_may_keep_their_own_order(chats, tokenizer):
    made = opened(chats, tokenizer, shuffle=False)
    learned_rows = [text for step in (1, 2, 3) for text in learned(tokenizer, made.batch(step, 4))]
    assert learned_rows == [f"say {i % 10}" for i in range(12)]


def test_what_is_learned_and_in_which_order_makes_the_identity(chats, tokenizer):
    same = {opened(chats, tokenizer).identity for _ in range(2)}
    others = {opened(chats, tokenizer, seed=4).identity, opened(chats, tokenizer, shuffle=False).identity}
    chats.write_text(chats.read_text().replace("say 7", "say 8"))
    others.add(opened(chats, tokenizer).identity)
    assert len(same) == 1
    assert len(same | others) == 4


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


def test_a_demonstration_exactly_as_long_as_the_bound_is_learned_and_one_token_more_is_not(chats, tokenizer):
    long = {"messages": [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}]}
    chats.write_text(chats.read_text() + json.dumps(long) + "\n")
    longest = max(sequence.tokens for sequence in opened(chats, tokenizer).batch(1, 11))
    assert opened(chats, tokenizer, max_tokens=longest).tally.counts == {"rows": 11, "train": 11}
    below = opened(chats, tokenizer, max_tokens=longest - 1).tally.counts
    assert below == {"rows": 11, "overlong": 1, "train": 10}


def test_a_file_without_demonstrations_is_an_error_that_names_it(tmp_path, tokenizer):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(UserError, match=r"questions\.jsonl, row 1"):
        opened(path, tokenizer)
