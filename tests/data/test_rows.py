"""Files as people have them: every format gives the same rows, and every flaw is told with file and row."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.files import FileQuestions, Tally
from megarl.data.prompts import open_prompts
from megarl.data.rows import csv_rows, json_line_rows
from megarl.data.settings import DataSettings, FileSettings
from megarl.data.tables import read_rows
from megarl.errors import UserError

ROWS = [
    {"question": "What is 1 + 1?", "answer": "2"},
    {"question": 'Say "hi", then\nstop: é ☃', "answer": "016"},
    {"question": "Which?", "answer": "a, b"},
]


def write(folder: Path, name: str) -> Path:
    """ROWS in the format that the name promises."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {
        "jsonl": lambda: "".join(json.dumps(r) + "\n" for r in ROWS),
        "json": lambda: json.dumps(ROWS, indent=2),
        "csv": lambda: (
            "question,answer\n" + "".join(f"{_quoted(r['question'])},{_quoted(r['answer'])}\n" for r in ROWS)
        ),
        "tsv": lambda: (
            "question\tanswer\n" + "".join(f"{_quoted(r['question'])}\t{r['answer']}\n" for r in ROWS)
        ),
    }
    kind = name.removesuffix(".gz").rsplit(".", 1)[-1]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(text[kind]().encode()))
    else:
        path.write_text(text[kind](), encoding="utf-8")
    return path


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def rows(path: Path, **settings) -> list:
    return [row.value for row in read_rows(path, **settings)]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.json.gz"]
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    assert rows(write(tmp_path, name)) == ROWS


def test_saved_datasets_are_read_like_files(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "two")
    assert rows(tmp_path / "one") == ROWS
    assert rows(tmp_path / "two", split="test") == ROWS[:1]
    with pytest.raises(UserError, match=r"several splits \(train, test\)\. Set split"):
        rows(tmp_path / "two")
    with pytest.raises(UserError, match="no split 'dev'"):
        rows(tmp_path / "two", split="dev")


def test_a_downloaded_repository_is_read_split_by_split(tmp_path):
    for name in (
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-0.parquet",
    ):
        write(tmp_path, name)
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "dataset_infos.json").write_text("{}")
    write(tmp_path, ".cache/train.parquet")
    assert rows(tmp_path, split="train") == ROWS + ROWS
    with pytest.raises(UserError, match=r"several splits \(test, train\)\. Set split"):
        rows(tmp_path)
    with pytest.raises(UserError, match=r"no files of split 'dev'\. Splits: test, train"):
        rows(tmp_path, split="dev")


def test_rows_of_a_folder_are_named_by_file_and_row(tmp_path):
    for name in ("data/train-0.jsonl", "data/train-1.jsonl"):
        write(tmp_path, name)
    settings = FileSettings(path=str(tmp_path), name="s", columns={"question": "question"}, verifier="exact")
    ids = [q.question_id for q in FileQuestions(settings, Tally())]
    assert ids[:2] == ["s/data/train-0.jsonl:1", "s/data/train-0.jsonl:2"]
    assert len(set(ids)) == 6


def test_json_lines_named_json_and_arrays_inside_an_object_are_read(tmp_path):
    (tmp_path / "lines.json").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (tmp_path / "inside.json").write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))
    (tmp_path / "one.json").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}], "n": 1}, indent=1)
    )
    (tmp_path / "in_one_line.json").write_text(json.dumps({"version": 1, "data": ROWS}) + "\n")
    task = {"question": "q", "tests": [{"stdin": "1", "stdout": "1"}]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    for name in ("lines", "inside", "in_one_line"):
        assert rows(tmp_path / f"{name}.json") == ROWS
    assert len(rows(tmp_path / "one.json")) == 1
    assert rows(tmp_path / "task.json") == [task]


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path):
    for name in ("a.jsonl", "a.csv", "a.json"):
        path = write(tmp_path, name)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert rows(path) == ROWS


def test_csv_values_stay_text(tmp_path):
    assert rows(write(tmp_path, "a.csv"))[1]["answer"] == "016"


@given(st.lists(st.fixed_dictionaries({"q": st.text(max_size=20)}), min_size=1, max_size=8))
def test_json_lines_come_back_as_written(tmp_path_factory, given_rows):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(r) for r in given_rows))
    assert [r.value for r in json_line_rows(path, 1 << 20)] == given_rows


# What is wrong with a file as a whole is one clear error.


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.csv", b"question,answer\n", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", gzip.compress(b"[]", mtime=0), r"gzip-compressed\. Rename it to a\.json\.gz"),
        ("a.jsonl.gz", b"{}\n", "not gzip-compressed, though its name ends in .gz"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:-20], r"can't be read any further"),
        ("a.json", b"[1, 2", "not a JSON document"),
        ("a.json", b"5", "a JSON int, where an array of objects is needed"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "encoded as UTF-16"),
        ("a.parquet", b"PAR1 not really", "not readable as parquet"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("a.csv", b"question;answer\n1;2\n", "separated by semicolons"),
        ("a.csv", b"q,q\n1,2\n", "two columns are named 'q'"),
        ("a.csv", b"question,answer\rq,1\r", "the header is not CSV"),
        ("a.csv", b'"question,answer\nq,1\n', "the header is not CSV"),
        ("a.csv", "réponse,answer\nq,1\n".encode("latin-1"), "the header is not UTF-8"),
        ("a.arrow", b"ARROW1", "Name the folder"),
        ("a.txt", b"x", r"unknown ending '\.txt'"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        rows(path)
    assert str(path) in str(caught.value)


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        list(read_rows(tmp_path / ("x" * 5000)))
    with pytest.raises(UserError, match="no such file or folder"):
        rows(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no data files"):
        rows(tmp_path)


# What is wrong with one row is an error with its number, or counted.

BAD_ROWS = [
    (b"{not json}", "row 2: not JSON"),
    (b"[1, 2]", "row 2: a JSON list, where an object is needed"),
    (b'{"question": "caf\xe9", "answer": "1"}', "row 2: not UTF-8: byte 0xe9 at 17"),
    (b'{"question": "q"}', "row 2: no column 'answer'"),
    (b'{"Question": "q", "answer": "1"}', "row 2: no column 'question' .*Did you mean 'Question'"),
    (b'{"question": "q", "answer": NaN}', "row 2: the answer is nan"),
    (b'{"question": "q", "answer": Infinity}', "row 2: the answer is inf"),
    (b'{"question": "q", "answer": "NaN"}', "row 2: the answer is NaN"),
    (b'{"question": "q", "answer": null}', "row 2: the answer is missing"),
    (b'{"question": "q", "answer": "  "}', "row 2: the answer is empty"),
    (b'{"question": "q", "answer": []}', "row 2: the answer is an empty list"),
    (b'{"question": "q", "answer": {"a": 1}}', "row 2: the answer is an object, not text"),
    (b'{"question": "", "answer": "1"}', "row 2: 'question' is empty"),
    (
        b'{"question": "a\\ud800", "answer": "1"}',
        "row 2: 'question' is not valid Unicode: half a character at 1",
    ),
    (b'{"question": null, "answer": "1"}', "row 2: 'question' is missing \\(null\\), not text or messages"),
    (b'{"question": 7, "answer": "1"}', "row 2: 'question' is an integer, not text or messages"),
    (b'{"question": [{"role": "bot", "content": "x"}], "answer": "1"}', "message 1 has the role 'bot'"),
    (b'{"question": [{"role": "user"}], "answer": "1"}', "message 1 is missing \\(null\\), not text"),
    (
        b'{"question": [{"role": "assistant", "content": "x"}], "answer": "1"}',
        "ends with a message of the assistant",
    ),
    (
        b'{"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}',
        "parts that are not text",
    ),
    (b'{"a":' * 100_000, "row 2: not JSON: nested too deeply"),
    (
        b'{"question": "' + b"x" * 5000 + b'", "answer": "1"}',
        r"row 2: longer than 4,096 bytes \(max_row_bytes\)",
    ),
]


@pytest.mark.parametrize(("bad", "says"), BAD_ROWS, ids=[says[:40] for _, says in BAD_ROWS])
def test_a_bad_row_is_an_error_with_its_number_or_counted(tmp_path, bad, says):
    good = b'{"question": "q%d", "answer": "1"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(good % 1 + bad + b"\n" + good % 3)
    limit = 4096 if len(bad) < 10_000 else 1 << 20
    settings = {
        "path": str(path),
        "columns": {"question": "question", "answer": "answer"},
        "verifier": "exact",
        "max_row_bytes": limit,
    }
    with pytest.raises(UserError, match=says) as caught:
        list(FileQuestions(FileSettings(**settings), Tally()))
    assert str(path) in str(caught.value)
    assert "set on_bad_row to 'skip'" in str(caught.value)
    tally = Tally()
    kept = [q.question_id for q in FileQuestions(FileSettings(**settings, on_bad_row="skip"), tally)]
    assert kept == ["a/1", "a/3"]
    assert tally.counts == {"rows": 3, "malformed": 1}
    assert len(tally.problems) == 1


def test_csv_flaws_are_told_by_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'q,a\nx,1\n"two\nlines",2\nx\nx,1,2\nx,"caf\xe9"\nlast,3\n')
    read = list(csv_rows(path, 1 << 20))
    assert [r.number for r in read] == [2, 3, 5, 6, 7, 8]
    assert [r.problem for r in read] == [
        None,
        None,
        "1 fields, the header has 2",
        "3 fields, the header has 2",
        "not UTF-8",
        None,
    ]


def test_an_open_quote_that_swallows_the_file_is_a_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('q,a\nfine,1\n"never closed,2\n' + "x,1\n" * 50)
    problems = [r.problem for r in csv_rows(path, 1 << 20) if r.problem]
    assert len(problems) == 1
    assert "not CSV" in problems[0]


def test_parquet_gaps_are_bad_rows(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist(
        [{"q": "a", "a": 1.0}, {"q": "b", "a": float("nan")}, {"q": None, "a": 2.0}]
    )
    pyarrow.parquet.write_table(table, path)
    tally = Tally()
    settings = FileSettings(
        path=str(path), columns={"question": "q", "answer": "a"}, verifier="exact", on_bad_row="skip"
    )
    assert len(list(FileQuestions(settings, tally))) == 1
    assert [p.split(": ", 1)[1] for p in tally.problems] == [
        "the answer is nan",
        "'q' is missing (null), not text or messages",
    ]


def test_a_gigabyte_line_is_skipped_without_being_held_in_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"question": "q", "answer": "1"}\n')
        file.truncate(1 << 30)  # a hole in the file: one line of zeros, a gigabyte long, that takes no disk
        file.seek(1 << 30)
        file.write(b'\n{"question": "r", "answer": "2"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = list(json_line_rows(path, 1 << 20))
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert [(r.number, r.problem is None) for r in read] == [(1, True), (2, False), (3, True)]
    assert grown_mib < 64


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_json_document_too_large_for_memory_is_refused_before_it_is_read(tmp_path, name):
    path = tmp_path / name
    content = b'[{"a": "' + b"x" * 20_000 + b'"}]'
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    assert len(rows(path, max_row_bytes=2000)) == 1
    with pytest.raises(UserError, match=rf"{name}: a JSON document of more than 16,000 bytes"):
        rows(path, max_row_bytes=1000)


def test_a_source_of_only_bad_rows_says_so_with_the_first(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"wrong": 1}\n' * 5)
    source = {"kind": "file", "path": str(path), "preset": "gsm8k", "on_bad_row": "skip"}
    with pytest.raises(
        UserError, match=r"no prompt to train on \(5 rows, 5 malformed.*; first: .*row 1: no column"
    ):
        open_prompts(DataSettings(sources=[source]), tokenizer)


def test_files_and_tasks_mix_into_one_stream_with_every_row_counted(tokenizer, tmp_path):
    path = tmp_path / "sums.jsonl"
    lines = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(200)]
    lines += [
        lines[0],
        {"question": "What  is 1 +\n1?", "answer": "#### 2"},
        {"question": "q", "answer": "no mark"},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in lines))
    settings = DataSettings(
        sources=[
            {"kind": "file", "path": str(path), "preset": "gsm8k", "on_bad_row": "skip", "weight": 3},
            {"kind": "reasoning_gym", "task": "chain_sum"},
        ],
        heldout={"count": 10},
    )
    made = open_prompts(settings, tokenizer)
    count = made.counts["sums"]
    assert count["rows"] == 203
    assert (count["malformed"], count["duplicate"]) == (1, 2)
    assert count["malformed"] + count["duplicate"] + count["held_out"] + count["train"] == 203
    assert made.problems["sums"] == (f"{path}, row 203: the answer has no '####' before its final number",)
    told = made.summary()
    assert told[0].startswith("sums: 203 rows, 1 malformed, 2 duplicate")
    assert told[1] == f"  {path}, row 203: the answer has no '####' before its final number"
    assert told[2] == "chain_sum: endless; 10 held_out"
    drawn = made.stream().next(40)
    assert sum(p.prompt_id.startswith("sums/") for p in drawn) == 30
    assert {p.verifier for p in drawn} == {"math", "reasoning_gym"} == made.verifiers


FLAWED = [
    ('{"question": "a", "answer": "1", "answer": "2"}', "the key 'answer' is there twice"),
    ('{"question": {"a": 1, "a": 1}, "answer": "2"}', "the key 'a' is there twice in 'question'"),
]


@pytest.mark.parametrize(("line", "problem"), FLAWED, ids=range(len(FLAWED)))
def test_a_repeated_key_is_told_by_its_row(tmp_path, line, problem):
    good = r'{"question": "😀 \ud83d\ude00", "answer": "1"}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    (tmp_path / "a.json").write_text(f"[{good}, {line}]")
    (tmp_path / "b.json").write_text(f'{{"data": [{good}, {line}]}}')
    for name in ("a.jsonl", "a.json", "b.json"):
        first, second = read_rows(tmp_path / name)
        assert first.value == {"question": "😀 😀", "answer": "1"}
        assert (second.number, second.value) == (2, None)
        assert second.problem is not None
        assert second.problem.startswith(problem)


def test_a_document_that_says_a_key_twice_is_not_read_as_the_last_of_them(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"data": [{"a": 1}], "data": [{"a": 2}]}')
    (row,) = read_rows(path)
    assert row.problem == "the key 'data' is there twice"


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="two columns are named 'a'"):
        list(read_rows(tmp_path / "a.parquet"))
