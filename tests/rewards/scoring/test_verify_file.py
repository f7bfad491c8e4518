"""A file of responses is scored without training; mistakes in it name file and row."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.rewards import Columns, parse_options, verify_file

ROWS = [
    {"response": r"\boxed{5}", "answer": "5", "label": True},
    {"response": r"\boxed{6}", "answer": "5", "label": False},
    {"response": r"\boxed{5.0}", "answer": "5", "label": False},
    {"response": "five", "answer": "5", "label": True},
    {"response": r"\boxed{x+1}", "answer": "1+x"},
]


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_three_lines_score_a_file_and_show_the_confusion(tmp_path):
    path = write_lines(tmp_path / "responses.jsonl", ROWS)

    report = verify_file(path, verifier="math", workers=1)

    assert (report.rows, report.responses, report.scored, report.mean) == (5, 5, 5, 3 / 5)
    assert report.confusion == dict.fromkeys(itertools.product(("right", "wrong"), repeat=2), 1)
    assert report.agreement == 0.5
    assert {line.split(":")[0] for line in report.disagreements} == {"row 3", "row 4"}
    shown = str(report)
    assert "mean score 0.6000 over 5 scored" in shown
    assert "agreement 0.5000" in shown
    assert "part answered: mean 0.8000" in shown


def test_a_row_may_hold_several_responses_with_their_labels_and_the_verdicts_are_written(tmp_path):
    rows = [{"out": ["Answer: 5", "Answer: 6"], "gold": 5, "label": ["right", "wrong"]}]
    path = write_lines(tmp_path / "x.jsonl", rows)
    out = tmp_path / "verdicts.jsonl"
    columns = Columns(response="out", answer="gold")
    report = verify_file(path, verifier="exact", columns=columns, workers=0, write=out)
    assert report.agreement == 1.0
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(v["row"], v["index"], v["value"]) for v in verdicts] == [(1, 0, 1.0), (1, 1, 0.0)]


@pytest.mark.parametrize("ending", ["csv", "parquet", "json"])
def test_other_formats_are_read_too(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    rows = [{"response": "Answer: B", "answer": "B", "label": "correct"}]
    if ending == "csv":
        path.write_text("response,answer,label\nAnswer: B,B,correct\n")
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))
    assert verify_file(path, verifier="multiple_choice", workers=0).agreement == 1.0


def test_a_ground_truth_object_or_its_json_text_is_what_the_verifier_gets(tmp_path):
    ground_truth = {"dataset": "gcd", "entry": {"answer": "4", "metadata": {}}}
    rows = [
        {"response": "4", "ground_truth": ground_truth},
        {"response": "4", "ground_truth": json.dumps(ground_truth)},
    ]
    report = verify_file(write_lines(tmp_path / "x.jsonl", rows), verifier="reasoning_gym", workers=0)
    assert report.mean == 1.0


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("not json\n", "row 2: "),
        ({"respons": "x", "answer": "5"}, "row 2: no column 'response'. Did you mean 'respons'"),
        ({"response": 5, "answer": "5"}, "row 2: column 'response' holds 5"),
        ({"response": "x", "answer": "5", "label": "perhaps"}, "row 2: label 'perhaps' is neither"),
        ({"response": ["x"], "answer": "5", "label": [True, False]}, "row 2: 2 labels for 1 responses"),
        ({"response": "x"}, "row 2: 'answer' is None"),
        ('{"response": "x", "answer": NaN}\n', "row 2: "),
        ({"response": "x", "ground_truth": "{broken"}, "row 2: column 'ground_truth' is no JSON"),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_row_or_a_counted_skip(tmp_path, bad, problem):
    path = write_lines(tmp_path / "x.jsonl", [{"response": "5", "answer": "5"}, bad])
    with pytest.raises(UserError) as error:
        verify_file(path, verifier="exact", workers=0)
    assert f"{path}, {problem}" in str(error.value)
    report = verify_file(path, verifier="exact", workers=0, on_bad_row="skip")
    assert (report.responses, report.bad_rows, report.mean) == (1, 1, 1.0)
    assert problem in str(report)


def test_wrong_files_verifiers_and_options_are_refused(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(UserError, match="no such file"):
        verify_file(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match=r"Did you mean 'math'"):
        verify_file(path, verifier="maths")
    with pytest.raises(UserError, match=r"has no option 'mod'\. Did you mean 'mode'"):
        verify_file(path, options={"mod": "lenient"})
    with pytest.raises(UserError, match="cannot be written"):
        verify_file(path, verifier="exact", workers=0, write=tmp_path / "no" / "folder.jsonl")
    empty = write_lines(tmp_path / "empty.jsonl", [])
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        verify_file(empty)


def test_options_on_a_command_line_are_read_as_yaml():
    assert parse_options(["mode=lenient", "n=3", "forms=[boxed, hashes]", "x=a=b"]) == {
        "mode": "lenient",
        "n": 3,
        "forms": ["boxed", "hashes"],
        "x": "a=b",
    }
    with pytest.raises(UserError, match="write it as key=value"):
        parse_options(["lenient"])


def test_unscored_responses_are_counted_with_their_reason(tmp_path):
    rows = [{"response": "x", "pattern": "("}] + [{"response": "x", "pattern": "x"}] * 2
    path = write_lines(tmp_path / "x.jsonl", rows)
    report = verify_file(path, verifier="regex", workers=0, on_bad_row="skip")
    assert (report.bad_rows, report.mean) == (1, 1.0)
    report = verify_file(path, verifier="tests.rewards.scoring.verifiers_for_tests:raises", workers=0)
    assert report.mean is None
    assert report.unscored == {"raised KeyError: 'answer'": 3}


def test_verdicts_never_replace_what_they_are_about_nor_what_they_do_not_supersede(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ROWS)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"x\.jsonl: holds the responses"):
        verify_file(path, verifier="exact", workers=0, write=path)
    assert path.read_bytes() == before
    earlier = write_lines(tmp_path / "verdicts.jsonl", [{"row": 1}])
    before = earlier.read_bytes()
    bad = write_lines(tmp_path / "bad.jsonl", [*ROWS, "{broken"])
    with pytest.raises(UserError, match=r"bad\.jsonl, row 6.*--skip-bad-rows"):
        verify_file(bad, verifier="exact", workers=0, write=earlier)
    assert earlier.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.jsonl", "verdicts.jsonl", "x.jsonl"]
    verify_file(path, verifier="exact", workers=0, write=earlier)
    assert len(earlier.read_text().splitlines()) == 5
    verify_file(path, verifier="exact", workers=0, write="/dev/null")
    assert not Path("/dev/null").is_file()


def test_text_that_is_no_unicode_is_shown_and_written_escaped(tmp_path, capsys):
    row = {"question \ud800": "q", "answer": "1", "response": "\ud800", "label": True}
    path = write_lines(tmp_path / "x.jsonl", [row, {"question": "q", "answer": "#### 1", "response": "1"}])
    for command in (["verify", str(path), "--verifier", "exact"], ["data", "inspect", str(path)]):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 0
        assert "\\ud800" in capsys.readouterr().out


def test_a_ground_truth_that_a_task_refuses_is_a_bad_row(tmp_path):
    entry = {"question": "q", "answer": "5", "metadata": {}}
    tasks = [
        {"dataset": "chain_sum", "entry": entry, "config": {"foo": 1}},
        {"dataset": "chain_sum", "entry": entry, "config": [1]},
        {"dataset": "chain_sum", "entry": entry, "config": {"min_terms": "a"}},
        {"dataset": "composite", "entry": entry},
        {"dataset": "chain_sum", "entry": entry, "config": None},
    ]
    path = write_lines(tmp_path / "x.jsonl", [{"response": "5", "ground_truth": task} for task in tasks])
    report = verify_file(path, verifier="reasoning_gym", workers=0, on_bad_row="skip")
    assert (report.bad_rows, report.scored, report.mean) == (4, 1, 1.0)
    assert "row 1: reasoning_gym's task 'chain_sum' refuses its 'config'" in report.problems[0]
