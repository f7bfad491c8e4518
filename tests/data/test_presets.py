"""Each preset on a small file in that data set's own columns; what it reads is what its verifier scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.files import FileQuestions, Tally, open_conversations
from megarl.data.presets import PRESETS, RowReader, detect_preset
from megarl.data.questions import content_key
from megarl.data.settings import DemonstrationSettings, FileSettings
from megarl.data.tables import read_rows
from megarl.data.values import RowError, after_hashes, last_boxed
from megarl.errors import UserError

FOLDER = Path(__file__).parent.parent / "fixtures" / "datasets"
DIVISORS = "How many positive divisors has 360?"


def questions(preset: str | None, file: str, **settings):
    source = FileSettings(path=str(FOLDER / file), preset=preset, name="s", **settings)
    return list(FileQuestions(source, Tally()))


@pytest.mark.parametrize(
    ("preset", "file", "answers"),
    [
        ("gsm8k", "gsm8k.jsonl", ["36", "1250", "-5"]),
        ("math", "competition_math.jsonl", [r"\frac{5}{6}", r"[1,\infty)", "4"]),
        ("math", "math500.jsonl", ["32", r"\left( 2, \frac{\pi}{2} \right)"]),
        ("dapo", "dapo_math.jsonl", ["-9", "24", "24", "10"]),
        ("dapo", "dapo_processed.jsonl", ["24"]),
        ("dapo", "slime_dapo.jsonl", ["24"]),
        ("deepscaler", "deepscaler.json", ["25", r"5\sqrt{2}"]),
        ("aime", "aime_2024_h4.jsonl", ["001"]),
        ("aime", "aime_2024_table.csv", ["1", "32"]),
        ("aime", "aime_2025.jsonl", ["32"]),
    ],
)
def test_math_sets_give_the_final_answer_which_the_math_verifier_accepts(preset, file, answers):
    from megarl.rewards import verify

    read = questions(preset, file)
    assert [q.ground_truth["answer"] for q in read] == answers
    assert {q.verifier for q in read} == {"math"}
    for question, answer in zip(read, answers, strict=True):
        assert verify("math", rf"So it is $\boxed{{{answer}}}$.", question.ground_truth).value == 1
        assert verify("math", r"So it is $\boxed{-12345}$.", question.ground_truth).value == 0


def test_one_question_in_three_layouts_of_dapo_is_one_question():
    """The frame that the data set puts around a question is not part of the question."""
    files = ("dapo_math.jsonl", "dapo_processed.jsonl", "slime_dapo.jsonl")
    found = [q for file in files for q in questions("dapo", file) if DIVISORS in q.content]
    assert len(found) == 4
    assert {content_key(q.content) for q in found} == {content_key(DIVISORS)}
    assert (
        found[0].messages[0]["content"].startswith("Solve the following math problem")
    )  # rows stay as they are


def test_live_code_bench_gives_the_code_verifier_its_tests():
    from megarl.rewards.verifiers.code.unit_tests import CallTest, StdinTest, read_tests

    first, second = questions("livecodebench", "livecodebench.jsonl")
    assert first.verifier == second.verifier == "code"
    assert read_tests(first.ground_truth) == (StdinTest("1 2\n", "3\n"), StdinTest("5 -7\n", "-2\n"))
    calls = read_tests(second.ground_truth)
    assert [(c.function, c.args) for c in calls if isinstance(c, CallTest)] == [
        ("twice", (4,)),
        ("twice", (-1,)),
    ]
    assert "def twice(self, n: int) -> int:" in second.messages[0]["content"]
    assert "python" not in first.messages[0]["content"]


def test_chat_rows_ask_up_to_the_last_answer():
    first, second = questions("messages", "chat_messages.jsonl", verifier="exact")
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert [m["content"] for m in second.messages] == ["Hello", "Hello. What can I do?", "What is 3 * 3?"]
    assert (second.verifier, second.ground_truth) == ("exact", {"answer": "9"})
    (shared,) = questions("messages", "sharegpt.jsonl", verifier="exact")
    assert list(shared.messages) == [{"role": "user", "content": "What is 2 + 2?"}]
    assert shared.ground_truth == {}


def test_chat_rows_without_a_verifier_say_so():
    with pytest.raises(UserError, match="Set verifier"):
        questions("messages", "chat_messages.jsonl")


def learned(tokenizer, sequence) -> str:
    return tokenizer.hf.decode(sequence.token_ids[sequence.loss_mask])


@pytest.mark.parametrize(
    ("preset", "file", "texts"),
    [
        ("messages", "chat_messages.jsonl", ["4<|im_end|>", "Hello. What can I do?<|im_end|>9<|im_end|>"]),
        ("messages", "sharegpt.jsonl", ["4<|im_end|>"]),
        ("prompt_response", "alpaca.jsonl", ["4<|im_end|>", "Hello.<|im_end|>"]),
    ],
)
def test_conversations_are_learned_where_the_assistant_speaks(tokenizer, preset, file, texts):
    sequences, tally = open_conversations(
        DemonstrationSettings(path=str(FOLDER / file), preset=preset), tokenizer
    )
    assert [learned(tokenizer, s) for s in sequences] == texts
    assert tally.counts == {"rows": len(texts), "train": len(texts)}


def test_an_instructions_input_is_part_of_the_prompt(tokenizer):
    (first, _), _ = open_conversations(
        DemonstrationSettings(path=str(FOLDER / "alpaca.jsonl"), preset="prompt_response"), tokenizer
    )
    assert "Add the numbers.\n\n2 and 2" in tokenizer.decode(first.token_ids)


@pytest.mark.parametrize(
    ("file", "rejected"), [("preference_messages.jsonl", "5, I think."), ("preference_texts.jsonl", "22")]
)
def test_a_preference_pair_has_one_prompt_and_two_answers(file, rejected):
    (row,) = read_rows(FOLDER / file)
    assert row.value is not None
    pair = RowReader("preference").preference(row.value)
    assert pair.prompt == [{"role": "user", "content": "What is 2 + 2?"}]
    assert (pair.chosen, pair.rejected) == ("4", rejected)


def test_overlong_demonstrations_are_counted_or_an_error_and_never_cut(tokenizer):
    settings = {"path": str(FOLDER / "chat_messages.jsonl"), "preset": "messages", "max_tokens": 40}
    sequences, tally = open_conversations(DemonstrationSettings(**settings), tokenizer)
    assert tally.counts == {"rows": 2, "overlong": 1, "train": 1}
    assert learned(tokenizer, sequences[0]) == "4<|im_end|>"
    with pytest.raises(UserError, match=r"chat_messages\.jsonl, row 2: \d+ tokens, max_tokens is 40"):
        open_conversations(DemonstrationSettings(**settings, overlong="error"), tokenizer)
    with pytest.raises(UserError, match="nothing to learn from"):
        open_conversations(DemonstrationSettings(**{**settings, "max_tokens": 3}), tokenizer)


def test_columns_stand_in_for_a_preset_and_extra_columns_reach_the_verifier(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"ask": {"text": "1 + 1"}, "gold": 2, "cases": [{"stdin": "", "stdout": "2"}]}\n')
    source = FileSettings(
        path=str(path),
        columns={"question": "ask.text", "answer": "gold"},
        ground_truth={"tests": "cases"},
        verifier="code",
    )
    (question,) = FileQuestions(source, Tally())
    assert (question.question_id, question.content) == ("own/1", "1 + 1")
    assert question.ground_truth == {"answer": 2, "tests": [{"stdin": "", "stdout": "2"}]}


def test_a_verifier_column_routes_mixed_rows(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"q": "a", "v": "exact"}\n{"q": "b", "v": "regex"}\n')
    source = FileSettings(path=str(path), columns={"question": "q", "verifier": "v"})
    assert [q.verifier for q in FileQuestions(source, Tally())] == ["exact", "regex"]


def test_nothing_said_about_the_columns_is_refused():
    with pytest.raises(UserError, match=r"set preset, or columns\.question"):
        questions(None, "gsm8k.jsonl")
    with pytest.raises(UserError, match=r"no preset 'gsm8'\. Did you mean 'gsm8k'"):
        questions("gsm8", "gsm8k.jsonl")


def test_a_wrong_preset_says_what_is_missing_and_which_would_fit():
    with pytest.raises(UserError) as caught:
        questions("gsm8k", "math500.jsonl")
    message = str(caught.value)
    assert "math500.jsonl, row 1: no column 'question'" in message
    assert "it has 'problem', 'solution', 'answer'" in message
    assert "The row fits preset 'math'." in message


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        ("gsm8k.jsonl", "gsm8k"),
        ("competition_math.jsonl", "math"),
        ("dapo_math.jsonl", "dapo"),
        ("slime_dapo.jsonl", "dapo"),
        ("livecodebench.jsonl", "livecodebench"),
        ("chat_messages.jsonl", "messages"),
        ("sharegpt.jsonl", "messages"),
        ("preference_messages.jsonl", "preference"),
        ("preference_texts.jsonl", "preference"),
        ("alpaca.jsonl", "prompt_response"),
    ],
)
def test_a_rows_shape_is_recognised(file, preset):
    row = next(iter(read_rows(FOLDER / file))).value
    assert row is not None
    assert detect_preset(row) == preset


def test_an_unknown_shape_is_not_guessed():
    assert detect_preset({"id": 1, "text": "just text"}) is None


def test_every_preset_says_what_it_is_for():
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.about
        assert all(callable(getattr(RowReader(name), use)) for use in preset.uses)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"first $\boxed{1}$, then $\boxed{2}$", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {3}", "3"),
        (r"$\boxed 4$", "4"),
    ],
)
def test_the_last_box_is_the_answer(solution, answer):
    assert last_boxed(solution) == answer


@pytest.mark.parametrize(
    "solution", ["no box", r"\boxed{1} and \boxed{2", r"\boxed{}", r"\boxed{ }", 5, None]
)
def test_a_solution_without_a_whole_last_box_is_a_bad_row(solution):
    with pytest.raises(RowError):
        last_boxed(solution)


@given(st.integers(-(10**9), 10**9))
def test_thousands_separators_go_and_digits_stay(number):
    assert after_hashes(f"work, 1,2 and so on\n#### {number:,}") == str(number)


def test_only_thousands_separators_go():
    assert after_hashes("#### 1,2") == "1,2"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": "a", "rejected": "b"}, "no column 'prompt'"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "'rejected' is empty"),
        (
            {
                "chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}],
                "rejected": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "b"}],
            },
            "differ before their last message",
        ),
    ],
)
def test_a_pair_that_teaches_nothing_is_a_bad_row(row, says):
    with pytest.raises(RowError, match=says):
        RowReader("preference").preference(row)
