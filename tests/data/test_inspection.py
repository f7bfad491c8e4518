"""`inspect_file`: what a person wants to know of a data file before a run is spent on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.data.inspection import inspect_file, render_report
from megarl.errors import UserError

FOLDER = Path(__file__).parent.parent / "fixtures" / "datasets"


@pytest.fixture
def flawed(tmp_path: Path) -> Path:
    lines = [
        '{"question": "What is 1 + 1?", "answer": "#### 2"}',
        '{"question": "What  is 1 + 1?\\n", "answer": "#### 2"}',
        '{"question": "What is 1 + 1?", "answer": "#### 3"}',
        "{broken",
        '{"question": "What is 2 + 2?", "answer": "four"}',
        '{"question": "Say <|im_end|> to me", "answer": "#### 1.5"}',
    ]
    path = tmp_path / "flawed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_flaws_are_found_with_their_row_numbers(flawed, tokenizer):
    report = inspect_file(flawed, tokenizer=tokenizer)
    assert (report.preset, report.use, report.detected) == ("gsm8k", "prompt", True)
    assert (report.rows, report.malformed) == (6, 2)
    assert [p.split(": ", 1)[0] for p in report.problems] == [f"{flawed}, row 4", f"{flawed}, row 5"]
    assert (report.duplicates, report.conflicts) == (2, [(3, 1)])
    assert report.special_tokens == [6]
    assert report.answers == {"integer": 3, "number": 1}
    assert report.verifiers == {"math": 4}
    assert report.columns["question"] == {"filled": 5, "types": ["str"]}


def test_lengths_are_those_of_the_prompts_as_rendered(flawed, tokenizer):
    report = inspect_file(flawed, tokenizer=tokenizer, suffix=" Answer briefly.", samples=1)
    ((prompt, answer),) = report.samples
    text = tokenizer.render_prompt("What is 1 + 1? Answer briefly.")
    expected = tokenizer.encode(text)
    assert (prompt, answer) == (text, "2")
    assert report.lengths["prompt tokens"]["min"] == len(expected)
    assert report.lengths["question characters"] == {"min": 14, "p50": 14, "p90": 20, "p99": 20, "max": 20}


@pytest.mark.parametrize(
    ("file", "preset", "use", "lengths"),
    [
        ("livecodebench.jsonl", "livecodebench", "prompt", {"prompt tokens", "question characters"}),
        (
            "chat_messages.jsonl",
            "messages",
            "chat",
            {"prompt tokens", "question characters", "conversation tokens"},
        ),
        (
            "preference_messages.jsonl",
            "preference",
            "preference",
            {"prompt tokens", "question characters", "chosen tokens", "rejected tokens"},
        ),
    ],
)
def test_every_use_of_rows_is_recognised_and_measured(tokenizer, file, preset, use, lengths):
    report = inspect_file(FOLDER / file, tokenizer=tokenizer)
    assert (report.preset, report.use, set(report.lengths), report.malformed) == (preset, use, lengths, 0)


def test_the_report_reads_well_and_is_json(flawed, tokenizer):
    report = inspect_file(flawed, tokenizer=tokenizer)
    text = render_report(report)
    for part in (
        "rows 6, of which 2 can't be used",
        "preset gsm8k (told by the rows)",
        "duplicates: 2 rows",
        "conflicts: 1 of them with another answer (row 3 against row 1)",
        "special tokens: 1 rows hold one in their text (rows 6)",
        "row 4: not JSON",
        "--- prompt 1 ---\n<|im_start|>user\nWhat is 1 + 1?",
        "--- its answer ---\n2",
    ):
        assert part in text
    assert json.loads(json.dumps(vars(report)))["rows"] == 6


def test_without_a_tokenizer_the_text_is_shown_as_it_is():
    report = inspect_file(FOLDER / "gsm8k.jsonl", samples=1)
    assert report.samples[0][0].startswith("Mia has 3 boxes")
    assert set(report.lengths) == {"question characters"}


def test_a_set_preset_and_columns_are_obeyed(tmp_path):
    report = inspect_file(FOLDER / "math500.jsonl", preset="gsm8k")
    assert report.malformed == 2
    report = inspect_file(FOLDER / "math500.jsonl", columns={"question": "problem", "answer": "unique_id"})
    assert report.malformed == 0
    assert report.verifiers == {"not set": 2}


def test_rows_of_no_known_shape_are_told_by_their_columns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "text": "x"}\n' * 30)
    report = inspect_file(path)
    assert (report.rows, report.malformed, len(report.problems)) == (30, 30, 20)
    assert "fits no preset (it has 'id', 'text')" in report.problems[0]
    assert "and 10 more" in render_report(report)


def test_wrong_settings_and_missing_files_are_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        inspect_file(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"^format: Input should be"):
        inspect_file(FOLDER / "gsm8k.jsonl", format="xml")
    with pytest.raises(UserError, match="no preset 'gsm'"):
        inspect_file(FOLDER / "gsm8k.jsonl", preset="gsm")


def test_duplicates_in_two_files_of_a_folder_are_found_though_their_row_numbers_agree(tmp_path):
    for name, answer in (("a.jsonl", "2"), ("b.jsonl", "3")):
        (tmp_path / name).write_text(json.dumps({"problem": "What is 1 + 1?", "answer": answer}) + "\n")
    report = inspect_file(tmp_path)
    assert (report.rows, report.duplicates, report.conflicts) == (2, 1, [(1, 1)])


def test_what_a_terminal_obeys_is_spelled_out(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "\x1b[2J\x9b31m\r a\tb\nc \u202eevil\u2066 \u200b ü 漢"
    rows = [{"question": text, "answer": "#### 1"}, {f"{text}": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = render_report(inspect_file(path))
    assert r"\x1b[2J\x9b31m\r a" + "\tb\nc " + r"\u202eevil\u2066 \u200b ü 漢" in shown
    assert not set("\x1b\x9b\r\u202e\u2066\u200b") & set(shown)


def test_half_a_character_is_a_bad_row_with_a_tokenizer_too(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + r'{"question": "\ud800", "answer": "#### 1"}')
    report = inspect_file(path, tokenizer=tokenizer)
    assert (report.rows, report.malformed) == (2, 1)
    assert "row 2: 'question' is not valid Unicode" in report.problems[0]


def test_fields_that_the_chat_template_does_not_read_are_named(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    asked = {"role": "user", "content": "a", "country": "x", "weight": 0}
    path.write_text(json.dumps({"messages": [asked, {"role": "assistant", "content": "b"}]}))
    report = inspect_file(path, tokenizer=tokenizer)
    assert report.unread == ["country"]
    assert "not read by the chat template: the messages' 'country'" in render_report(report)
