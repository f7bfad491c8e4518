"""Questions and conversations in files: rows read, shaped, and every bad one accounted for."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megarl.data.packing import TokenSequence
from megarl.data.presets import RowReader, detect_preset
from megarl.data.questions import Question, digest_of, frame
from megarl.data.rows import Row
from megarl.data.settings import DemonstrationSettings, FileSettings, RowSettings, source_name
from megarl.data.tables import read_rows
from megarl.data.tokenizer import ChatTokenizer
from megarl.data.values import RowError
from megarl.data.wording import Message
from megarl.errors import UserError

KEPT_PROBLEMS = 20  # bad rows that are kept to be shown; all are counted
BATCH = 1024  # rows encoded at once

Shaped = TypeVar("Shaped")


@dataclass
class Tally:
    """What became of a source's rows.

    counts: rows, malformed, and whatever the reader of the rows adds. problems: the first bad rows, told.
    unread: fields of messages that the chat template does not mention, by the number of rows that have them.
    digest: of all that is learned, where conversations are read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    digest: Any = field(default_factory=partial(hashlib.blake2b, digest_size=16))

    def summary(self) -> str:
        """Return counts and the first problem, for a message."""
        counts = ", ".join(f"{n} {what}" for what, n in self.counts.items()) or "no rows"
        parts = [counts, *([f"first: {self.problems[0]}"] if self.problems else []), *self.notices()]
        return "; ".join(parts)

    def notices(self) -> list[str]:
        """Return what a person should know beside the counts."""
        if not self.unread:
            return []
        return [f"the chat template does not read the messages' {', '.join(map(repr, sorted(self.unread)))}"]


def open_rows(settings: RowSettings) -> Iterator[Row]:
    """Return all rows of a source, the unreadable among them."""
    how = settings.model_dump(include={"format", "split", "delimiter", "max_row_bytes"})
    return read_rows(Path(settings.path), **how)


def shaped_rows(
    settings: RowSettings, shape: Callable[[Mapping[str, Any]], Shaped], tally: Tally
) -> Iterator[tuple[Row, Shaped]]:
    """Yield rows that could be read and shaped, with what they became.

    A bad row raises UserError with file, row and reason, or is counted in `tally`, as `on_bad_row` says.
    """
    for row in open_rows(settings):
        tally.counts["rows"] += 1
        problem = row.problem
        if row.value is not None:
            try:
                yield row, shape(row.value)
                continue
            except RowError as error:
                problem = str(error)
        told = f"{row.place}: {problem}"
        if settings.on_bad_row == "error":
            raise UserError(f"{told}.{_hint(settings, row)} To leave bad rows out, set on_bad_row to 'skip'.")
        tally.counts["malformed"] += 1
        if len(tally.problems) < KEPT_PROBLEMS:
            tally.problems.append(told)


def _hint(settings: RowSettings, row: Row) -> str:
    fitting = detect_preset(row.value) if row.value is not None else None
    return f" The row fits preset {fitting!r}." if fitting and fitting != settings.preset else ""


def row_reader(settings: RowSettings) -> RowReader:
    """Return how these rows are read. Raises UserError if neither a preset nor a column says where the question is."""
    if settings.preset is None and not settings.columns:
        raise UserError(f"{settings.path}: set preset, or columns.question (and columns.answer).")
    columns = {str(role): column for role, column in settings.columns.items()}
    if isinstance(settings, FileSettings):
        return RowReader(settings.preset, columns, settings.ground_truth, settings.verifier)
    return RowReader(settings.preset, columns)


class FileQuestions:
    """The questions of a source of rows, in order; its bad rows are in `tally`."""

    def __init__(self, settings: FileSettings, tally: Tally) -> None:
        self.settings, self.tally = settings, tally
        self.name = source_name(settings)
        self._reader = row_reader(settings)

    def __iter__(self) -> Iterator[Question]:
        root = Path(self.settings.path)
        for row, found in shaped_rows(self.settings, self._reader.prompt, self.tally):
            # The same number as in messages about the row; in a folder, behind the file it is in.
            inside = "" if row.file == root else f"{row.file.relative_to(root)}:"
            yield Question(
                question_id=f"{self.name}/{inside}{row.number}",
                messages=frame(found.asked, self.settings),
                content=found.bare,
                verifier=found.verifier,
                ground_truth=found.ground_truth,
                variables=found.variables,
            )


@dataclass(frozen=True)
class _Chat:
    """A conversation and what else its row gives to the chat template."""

    messages: list[Message]
    variables: dict[str, Any]


def open_conversations(
    settings: DemonstrationSettings, tokenizer: ChatTokenizer
) -> tuple[list[TokenSequence], Tally]:
    """Return conversations to learn from, encoded; all assistant turns are learned. None is cut.

    The tally counts rows, malformed, overlong, train. Raises UserError if none is left.
    """
    tally, kept, reader = Tally(), [], row_reader(settings)
    rows = shaped_rows(settings, lambda row: _Chat(reader.chat(row), reader.variables(row)), tally)
    while batch := list(islice(rows, BATCH)):
        for (row, chat), sequence in zip(batch, _encode(batch, tokenizer), strict=True):
            if settings.max_tokens is None or sequence.tokens <= settings.max_tokens:
                kept.append(sequence)
                tally.unread.update(tokenizer.unread_fields(chat.messages, chat.variables))
                tally.digest.update(digest_of(chat.messages, chat.variables))
            elif settings.overlong == "skip":
                tally.counts["overlong"] += 1
            else:
                raise UserError(
                    f"{row.place}: {sequence.tokens} tokens, max_tokens is {settings.max_tokens}. Raise it, "
                    "or set overlong to 'skip'."
                )
    tally.counts["train"] = len(kept)
    if not kept:
        raise UserError(f"{settings.path}: nothing to learn from ({tally.summary()}).")
    return kept, tally


def _encode(rows: Sequence[tuple[Row, _Chat]], tokenizer: ChatTokenizer) -> list[TokenSequence]:
    """Encode conversations at once; where that is refused, one after another, to say which row is."""
    try:
        return tokenizer.encode_chats(
            [chat.messages for _, chat in rows], [chat.variables for _, chat in rows]
        )
    except UserError:
        for row, chat in rows:
            try:
                tokenizer.encode_chat(chat.messages, chat.variables)
            except UserError as error:
                raise UserError(f"{row.place}: {error}") from error
        raise
