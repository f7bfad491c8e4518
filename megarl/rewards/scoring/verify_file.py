"""Score a file of responses without training, and compare the verdicts with labels.

    from megarl.rewards import verify_file
    report = verify_file("responses.jsonl", verifier="math")
    print(report)

A row holds a `response` (or a list of them) and what the verifier compares it with: a `ground_truth` object,
or its keys (`answer`, `tests`, `schema`...) as columns. A `label` column (true/false, right/wrong, 1/0) gives the
confusion.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import yaml

from megarl.data.json_text import load_json
from megarl.data.rows import Row
from megarl.data.tables import read_rows
from megarl.errors import UserError, did_you_mean, printable
from megarl.rewards.contract import BAD_GROUND_TRUTH, Response
from megarl.rewards.scoring.compose import Scored
from megarl.rewards.scoring.scorer import Scorer
from megarl.settings import user_path

RIGHT_FROM = 0.5  # a score from here on counts as "right" against a label
VERDICTS = ("right", "wrong", "unscored")
KEPT = 20  # disagreements and bad rows that are kept to be shown; all are counted
IN_FLIGHT_PER_WORKER = 64
_LABELS = {
    **dict.fromkeys(("true", "right", "correct", "yes", "pass", "passed", "1", "1.0"), True),
    **dict.fromkeys(("false", "wrong", "incorrect", "no", "fail", "failed", "0", "0.0"), False),
}


@dataclass(frozen=True)
class Columns:
    """The names of a row's columns. answer: a column to use as the ground truth's `answer`, if it has another name."""

    response: str = "response"
    ground_truth: str = "ground_truth"
    answer: str | None = None
    prompt: str = "prompt"
    label: str = "label"


@dataclass
class FileReport:
    """What a verifier said about a file.

    values: how many responses got each score. unscored: how many for each reason. confusion: how many by
    (label, one of VERDICTS). disagreements: the first of them, told with their rows.
    """

    path: Path
    verifier: str
    rows: int = 0
    responses: int = 0
    values: Counter[float] = field(default_factory=Counter)
    parts: dict[str, list[float]] = field(default_factory=dict)
    unscored: Counter[str] = field(default_factory=Counter)
    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)
    bad_rows: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def scored(self) -> int:
        return sum(self.values.values())

    @property
    def mean(self) -> float | None:
        """Return the mean score of what was scored; None if nothing was."""
        total = sum(value * count for value, count in self.values.items())
        return total / self.scored if self.scored else None

    @property
    def agreement(self) -> float | None:
        """Return the share of labelled responses whose verdict is the label's; None without labels."""
        labelled = sum(self.confusion.values())
        agreed = self.confusion["right", "right"] + self.confusion["wrong", "wrong"]
        return agreed / labelled if labelled else None

    def __str__(self) -> str:
        rate = self.responses / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.path}: {self.responses} responses in {self.rows} rows by {self.verifier!r}, "
            f"{self.seconds:.1f} s ({rate:.0f}/s)"
        ]
        if self.mean is not None:
            lines.append(f"mean score {self.mean:.4f} over {self.scored} scored")
            common = sorted(self.values.items(), key=lambda item: (-item[1], item[0]))[:8]
            lines.append("scores: " + ", ".join(f"{value:g} x {count}" for value, count in common))
        for name, values in sorted(self.parts.items()):
            lines.append(f"part {name}: mean {sum(values) / len(values):.4f}")
        for reason, count in self.unscored.most_common(8):
            lines.append(f"unscored: {count} x {reason}")
        if self.confusion:
            lines += ["", "label \\ verdict" + "".join(f"{verdict:>10}" for verdict in VERDICTS)]
            for label in ("right", "wrong"):
                counts = "".join(f"{self.confusion[label, verdict]:>10}" for verdict in VERDICTS)
                lines.append(f"{label:<15}{counts}")
            lines.append(f"agreement {self.agreement:.4f}")
        lines += [f"  {line}" for line in self.disagreements]
        if self.bad_rows:
            lines.append(f"bad rows left out: {self.bad_rows}")
            lines += [f"  {line}" for line in self.problems]
        return printable("\n".join(lines))


def verify_file(
    path: str | Path,
    *,
    verifier: str = "math",
    options: Mapping[str, Any] | None = None,
    columns: Columns = Columns(),
    format: str | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    workers: int = 2,
    timeout_s: float | None = None,
    write: str | Path | None = None,
) -> FileReport:
    """Score every response of a file (JSON lines, JSON, CSV, parquet) by one verifier.

    options: the verifier's own. timeout_s: per response; default: the verifier's. write: a JSON-lines file
    that gets one {"row", "index", "value", "parts", "reason"} per response, in the order of completion; it
    appears when it is whole.
    Raises UserError naming file and row for a row that can't be read, unless `on_bad_row` is "skip".
    """
    source = user_path(path)
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row must be 'error' or 'skip', not {on_bad_row!r}")
    part = {"name": verifier, "options": dict(options or {}), "timeout_s": timeout_s}
    report = FileReport(source, verifier)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(Scorer({"verifiers": [part], "workers": workers}))
        out = stack.enter_context(_written(user_path(write), source)) if write is not None else None
        rows = _Rows(source, format, columns, on_bad_row == "skip", report)
        asyncio.run(_score_all(rows, scorer, report, out))
    report.seconds = time.monotonic() - start
    return report


def parse_options(words: list[str]) -> dict[str, Any]:
    """Read `["mode=lenient", "percent=value"]` as a verifier's options; values are YAML."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"option {word!r}: write it as key=value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"option {word!r}: the value is no YAML ({error})") from None
    return options


@dataclass(frozen=True)
class _Task:
    row: Row
    index: int | None
    response: Response
    ground_truth: Mapping[str, Any]
    label: bool | None


class _BadRow(Exception):
    """What is wrong with a row."""


@dataclass(frozen=True)
class _Rows:
    """The file's rows as tasks; a bad one is an error, or counted in the report."""

    source: Path
    format: str | None
    columns: Columns
    skip: bool
    report: FileReport

    def tasks(self) -> Iterator[_Task]:
        for row in read_rows(self.source, format=self.format):
            self.report.rows += 1
            try:
                if row.value is None:
                    raise _BadRow(row.problem or "cannot be read")
                tasks = list(_responses(row, row.value, self.columns))
            except _BadRow as problem:
                self.refuse(row, str(problem))
            else:
                yield from tasks

    def refuse(self, row: Row, problem: str) -> None:
        told = f"{row.place}: {problem}"
        if not self.skip:
            raise UserError(
                f"{told.removesuffix('.')}. To leave bad rows out: --skip-bad-rows (in Python, on_bad_row='skip')."
            ) from None
        self.report.bad_rows += 1
        if len(self.report.problems) < KEPT:
            self.report.problems.append(told)


@contextlib.contextmanager
def _written(path: Path, source: Path) -> Iterator[IO[str]]:
    """Return a file to write that gets its name when everything is in it; a device or pipe is written as it is."""
    if path.exists() and source.exists() and path.samefile(source):
        raise UserError(f"{path}: holds the responses; write the verdicts to another file.")
    whole = path.is_file() or not path.exists()
    at = path.with_name(f".{path.name}.partial") if whole else path
    try:
        file = open(at, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    try:
        with file:
            yield file
        if whole:
            os.replace(at, path)
    finally:
        if whole:
            at.unlink(missing_ok=True)


def _responses(row: Row, value: Mapping[str, Any], columns: Columns) -> Iterator[_Task]:
    if columns.response not in value:
        hint = did_you_mean(columns.response, map(str, value))
        raise _BadRow(f"no column {columns.response!r}.{hint} It has {', '.join(map(repr, value))}")
    given = value[columns.response]
    texts = given if isinstance(given, list) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise _BadRow(f"column {columns.response!r} holds {given!r:.80}, a text or a list of texts is needed")
    labels = value.get(columns.label)
    labels = labels if isinstance(labels, list) else [labels] * len(texts)
    if len(labels) != len(texts):
        raise _BadRow(f"{len(labels)} labels for {len(texts)} responses")
    ground_truth = _ground_truth(value, columns)
    prompt = value.get(columns.prompt)
    for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
        response = Response(text, prompt=prompt if isinstance(prompt, str) else "")
        yield _Task(row, index if isinstance(given, list) else None, response, ground_truth, _label(label))


def _ground_truth(value: Mapping[str, Any], columns: Columns) -> Mapping[str, Any]:
    given = value.get(columns.ground_truth)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = load_json(given)
        except ValueError as error:
            raise _BadRow(f"column {columns.ground_truth!r} is no JSON: {error}") from None
    if not isinstance(given, Mapping):
        given = {key: held for key, held in value.items() if key not in (columns.response, columns.label)}
    if columns.answer is None:
        return given
    if columns.answer not in value:
        raise _BadRow(f"no column {columns.answer!r}.{did_you_mean(columns.answer, map(str, value))}")
    return {**given, "answer": value[columns.answer]}


def _label(given: Any) -> bool | None:
    if given is None or given == "":
        return None
    known = _LABELS.get(str(given).strip().casefold())
    if known is None:
        raise _BadRow(f"label {given!r} is neither true/false, right/wrong, nor 1/0")
    return known


async def _score_all(rows: _Rows, scorer: Scorer, report: FileReport, out: IO[str] | None) -> None:
    """Keep a bounded number of responses under way, so that memory doesn't grow with the file."""
    under_way: set[asyncio.Task[None]] = set()
    most = IN_FLIGHT_PER_WORKER * max(scorer.settings.workers, 1)
    bad_row = f"{report.verifier}: {BAD_GROUND_TRUTH}: "

    async def one(task: _Task) -> None:
        scored = await scorer.score_response(report.verifier, task.response, task.ground_truth)
        if (scored.reason or "").startswith(bad_row):
            rows.refuse(task.row, (scored.reason or "").removeprefix(bad_row))
            return
        _record(report, task, scored)
        if out is not None:
            parts = {key: value for key, value in scored.parts.items() if key != report.verifier}
            line = {"row": task.row.number, "index": task.index, "value": scored.reward, "parts": parts}
            out.write(json.dumps({**line, "reason": scored.reason}, ensure_ascii=False) + "\n")

    try:
        for task in rows.tasks():
            under_way.add(asyncio.create_task(one(task)))
            if len(under_way) >= most:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*done)
        await asyncio.gather(*under_way)
    finally:
        for left in under_way:
            left.cancel()


def _record(report: FileReport, task: _Task, scored: Scored) -> None:
    report.responses += 1
    if scored.reward is None:
        verdict = "unscored"
        report.unscored[(scored.reason or "").removeprefix(f"{report.verifier}: ")] += 1
    else:
        verdict = "right" if scored.reward >= RIGHT_FROM else "wrong"
        report.values[scored.reward] += 1
    for name, value in scored.parts.items():
        if name != report.verifier and value is not None:
            report.parts.setdefault(name.removeprefix(f"{report.verifier}/"), []).append(value)
    if task.label is None:
        return
    label = "right" if task.label else "wrong"
    report.confusion[label, verdict] += 1
    if label != verdict and len(report.disagreements) < KEPT:
        which = "" if task.index is None else f", response {task.index}"
        text = " ".join(task.response.text[-100:].split())
        gold = str(task.ground_truth.get("answer", ""))[:60]
        report.disagreements.append(
            f"row {task.row.number}{which}: labelled {label}, judged {verdict}; ground truth {gold!r}, ends {text!r}"
        )
