"""What is in a file of questions, conversations or pairs: `megarl data inspect FILE`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from megarl.data import messages
from megarl.data.files import KEPT_PROBLEMS, open_rows, row_reader
from megarl.data.presets import PRESETS, RowReader, detect_preset
from megarl.data.questions import content_key, frame
from megarl.data.rows import Row
from megarl.data.settings import FileSettings
from megarl.data.tokenizer import ChatTokenizer
from megarl.data.values import RowError
from megarl.data.wording import Message
from megarl.errors import UserError, printable

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
NO_VERIFIER = "not set"
SHOWN = 800  # characters of a sample that are shown


@dataclass
class Report:
    """What `inspect_file` found.

    preset, use: how rows were read (use: prompt, chat or preference); detected: the preset was told by the rows.
    rows, malformed: rows in all, and those that can't be used. problems: the first of them: file, row, reason.
    columns: by name, in how many rows it holds something, and the types it holds there.
    lengths: min, p50, p90, p99 and max of characters of the bare questions and, where a tokenizer was given, of
        tokens of rendered prompts and of whole sequences (chats, pairs).
    duplicates: rows whose question came before (whitespace aside). conflicts: those of them with another answer:
        (row, earlier row). special_tokens: rows whose text holds one of the tokenizer's special tokens.
    answers: how many answers are of each kind (integer, number, text, list, none).
    verifiers: rows by verifier. samples: the first prompts as rendered, with the answer's beginning.
    unread: fields of messages that the tokenizer's chat template does not mention.
    """

    path: str
    preset: str | None = None
    use: str | None = None
    detected: bool = False
    rows: int = 0
    malformed: int = 0
    problems: list[str] = field(default_factory=list)
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    duplicates: int = 0
    conflicts: list[tuple[int, int]] = field(default_factory=list)
    special_tokens: list[int] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    verifiers: dict[str, int] = field(default_factory=dict)
    samples: list[tuple[str, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def inspect_file(
    path: str | Path, *, tokenizer: ChatTokenizer | None = None, samples: int = 3, **settings: Any
) -> Report:
    """Read every row of a file or folder and report what a run would meet; bad rows are counted, not an error.

    tokenizer: adds token lengths and prompts as rendered. samples: prompts to show. settings: any of
    `FileSettings` (preset, columns, verifier, format, split, system, ...); without preset and columns, the first
    row that fits a preset tells it. Raises UserError for what can't be read at all and for wrong settings.
    """
    try:
        source = FileSettings(path=str(path), **settings)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{'.'.join(map(str, first['loc']))}: {message}") from error
    look = _Look(Report(str(path), preset=source.preset), source, tokenizer, samples)
    for row in open_rows(source):
        look.row(row)
    return look.finish()


def _use(reader: RowReader, row: Mapping[str, Any] | None) -> str:
    """Return what rows are for: the preset's use that reads this one; without a preset, by the roles that are set."""
    if reader.preset.name not in PRESETS:
        roles = set(reader.columns)
        return "preference" if "chosen" in roles else "chat" if "response" in roles else "prompt"
    found = None if row is None else reader.fitting_use(row)
    return found or reader.preset.uses[0]


class _Look:
    """What is gathered row by row."""

    def __init__(
        self, report: Report, source: FileSettings, tokenizer: ChatTokenizer | None, samples: int
    ) -> None:
        self.report, self.source, self.tokenizer, self.samples = report, source, tokenizer, samples
        self.reader: RowReader | None = None
        if source.preset is not None or source.columns:
            self._read_by(source.preset, None)
        self.special = tuple(tokenizer.hf.all_special_tokens) if tokenizer else ()
        self.seen: dict[bytes, tuple[int, str]] = {}  # content key -> (row, answer)
        self.measured: dict[str, list[int]] = {}
        self.answers: Counter[str] = Counter()
        self.verifiers: Counter[str] = Counter()

    def row(self, row: Row) -> None:
        self.report.rows += 1
        try:
            if row.value is None:
                raise RowError(row.problem)
            self._columns(row.value)
            self._shaped(row, row.value)
        except (RowError, UserError) as error:  # UserError: the chat template refuses the messages
            self.report.malformed += 1
            if len(self.report.problems) < KEPT_PROBLEMS:
                self.report.problems.append(f"{row.place}: {error}")

    def _read_by(self, preset: str | None, row: Mapping[str, Any] | None) -> None:
        self.reader = row_reader(self.source.model_copy(update={"preset": preset}))
        self.reader.verifier = self.reader.verifier or NO_VERIFIER
        self.report.use = _use(self.reader, row)

    def _columns(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            entry = self.report.columns.setdefault(name, {"filled": 0, "types": []})
            if value not in (None, "", [], {}) and value == value:  # NaN differs from itself
                entry["filled"] += 1
                kind = type(value).__name__
                if kind not in entry["types"]:
                    entry["types"].append(kind)

    def _shaped(self, row: Row, value: Mapping[str, Any]) -> None:
        if self.reader is None:
            found = detect_preset(value)
            if found is None:
                raise RowError(f"fits no preset (it has {', '.join(map(repr, value)) or 'nothing'})")
            self.report.preset, self.report.detected = found, True
            self._read_by(found, value)
        assert self.reader is not None
        variables = self.reader.variables(value)
        if self.report.use == "preference":
            pair = self.reader.preference(value)
            both = f"chosen: {pair.chosen}\nrejected: {pair.rejected}"
            self._asked(row, pair.prompt, messages.all_text(pair.prompt), both, variables)
            self._measure("chosen", [*pair.prompt, _said(pair.chosen)], variables)
            self._measure("rejected", [*pair.prompt, _said(pair.rejected)], variables)
        elif self.report.use == "chat":
            chat = self.reader.chat(value)
            self._asked(row, chat[:-1], messages.all_text(chat[:-1]), messages.all_text(chat[-1:]), variables)
            self._measure("conversation", chat, variables)
        else:
            prompt = self.reader.prompt(value)
            answer = prompt.ground_truth.get("answer")
            asked = frame(prompt.asked, self.source)
            self._asked(row, asked, prompt.bare, "" if answer is None else str(answer), variables)
            self.answers[_kind(answer)] += 1
            self.verifiers[prompt.verifier] += 1

    def _asked(
        self, row: Row, asked: Sequence[Message], bare: str, answer: str, variables: Mapping[str, Any]
    ) -> None:
        rendered = messages.all_text(asked)
        if self.tokenizer is not None:
            rendered = self.tokenizer.render_prompt(asked, variables)
            self.report.unread = sorted(
                {*self.report.unread, *self.tokenizer.unread_fields(asked, variables)}
            )
            self.measured.setdefault("prompt tokens", []).append(len(self.tokenizer.encode(rendered)))
            if any(mark in messages.all_text(asked) + answer for mark in self.special):
                self.report.special_tokens.append(row.number)
        self.measured.setdefault("question characters", []).append(len(bare))
        if len(self.report.samples) < self.samples:
            self.report.samples.append((rendered, answer))
        key = content_key(bare)
        if key not in self.seen:
            self.seen[key] = (row.number, answer)
            return
        first, earlier = self.seen[key]
        self.report.duplicates += 1
        if earlier != answer and self.report.use == "prompt":
            self.report.conflicts.append((row.number, first))

    def _measure(self, what: str, chat: Sequence[Message], variables: Mapping[str, Any]) -> None:
        if self.tokenizer is not None:
            tokens = self.tokenizer.encode_chat(chat, variables).tokens
            self.measured.setdefault(f"{what} tokens", []).append(tokens)

    def finish(self) -> Report:
        for what, lengths in self.measured.items():
            found = np.percentile(lengths, list(PERCENTILES.values()), method="inverted_cdf")
            self.report.lengths[what] = {p: int(v) for p, v in zip(PERCENTILES, found, strict=True)}
        self.report.answers = dict(self.answers.most_common())
        self.report.verifiers = dict(self.verifiers.most_common())
        return self.report


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _kind(answer: Any) -> str:
    if answer is None:
        return "none"
    if isinstance(answer, list):
        return "list"
    plain = str(answer).strip().replace(",", "")
    try:
        float(plain)
    except ValueError:
        return "text"
    return "integer" if plain.lstrip("+-").isdigit() else "number"


def render_report(report: Report) -> str:
    """Return the report as plain text, for a console: what a terminal would obey is spelled out."""
    lines = [report.path, f"  rows {report.rows:,}, of which {report.malformed:,} can't be used"]
    if report.preset:
        how = "told by the rows" if report.detected else "as set"
        lines.append(
            f"  preset {report.preset} ({how}), read as {report.use}: {PRESETS[report.preset].about}"
        )
    lines += _table(
        "columns",
        ((n, f"{c['filled']:,} filled, {', '.join(c['types'])}") for n, c in report.columns.items()),
    )
    lines += _table(
        "lengths", ((w, "  ".join(f"{p} {v:,}" for p, v in ps.items())) for w, ps in report.lengths.items())
    )
    lines += _table("answers", ((kind, f"{n:,}") for kind, n in report.answers.items()))
    lines += _table("verifiers", ((name, f"{n:,}") for name, n in report.verifiers.items()))
    lines.append(f"duplicates: {report.duplicates:,} rows ask what an earlier one asked")
    if report.conflicts:
        shown = ", ".join(f"row {row} against row {first}" for row, first in report.conflicts[:5])
        lines.append(f"conflicts: {len(report.conflicts):,} of them with another answer ({shown})")
    if report.special_tokens:
        shown = ", ".join(map(str, report.special_tokens[:5]))
        lines.append(
            f"special tokens: {len(report.special_tokens):,} rows hold one in their text (rows {shown})"
        )
    if report.unread:
        lines.append(f"not read by the chat template: the messages' {', '.join(map(repr, report.unread))}")
    if report.problems:
        more = report.malformed - len(report.problems)
        lines += [
            "problems",
            *(f"  {p}" for p in report.problems),
            *([f"  and {more:,} more"] if more else []),
        ]
    for i, (prompt, answer) in enumerate(report.samples, start=1):
        lines += [f"--- prompt {i} ---", _shown(prompt)]
        lines += ["--- its answer ---", _shown(answer)] if answer else []
    return printable("\n".join(lines))


def _table(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return [title, *(f"  {name:<{width}}  {value}" for name, value in listed)] if listed else []


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text):,} characters)"
