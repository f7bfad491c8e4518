"""Rows of text files: JSON lines, JSON and CSV, plain or gzipped, read so that no row is lost without a word.

A row that can't be read is given as a `Row` with its problem, so that the caller decides (an error, or
counted and skipped); a file that can't be read at all is the user's mistake. Memory is bounded by the
longest row allowed.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megarl.data.json_text import Twice, parse_json, repeated_key
from megarl.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"
WIDE_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00\xfe\xff": "UTF-32"}
LFS_POINTER = b"version https://git-lfs.github.com/spec"
# Lists of objects that a row may hold: an object with one of them is a row, not a file of rows.
LISTS_OF_A_ROW = (
    *("messages", "conversations", "prompt", "chosen", "rejected"),
    *("tests", "public_test_cases", "private_test_cases"),
)
DOCUMENT_ROWS = 16  # a JSON document may be as long as so many of the longest rows allowed
READ_ERRORS = (OSError, EOFError, zlib.error)  # what a truncated or damaged gzip raises


@dataclass(frozen=True)
class Row:
    """One row of a file: its value, or why there is none.

    number: from 1, as an editor counts: the line (JSON lines, CSV: where the row begins), else the position.
    """

    file: Path
    number: int
    value: Mapping[str, Any] | None = None
    problem: str | None = None

    @property
    def place(self) -> str:
        return f"{self.file}, row {self.number}"


def json_line_rows(path: Path, max_row_bytes: int) -> Iterator[Row]:
    """Yield the rows of JSON lines, one object a line; empty lines are passed over."""
    with _opened(path) as file:
        for number, line in _lines(path, file, max_row_bytes):
            if line is None:
                yield Row(path, number, problem=_too_long(max_row_bytes))
            elif line.strip():
                yield _json_row(path, number, line)


def json_rows(path: Path, max_row_bytes: int) -> Iterator[Row]:
    """Yield the rows of a JSON array, of an object that holds one (`{"data": [...]}`), or of JSON lines."""
    if _begins_json_lines(path, max_row_bytes):
        yield from json_line_rows(path, max_row_bytes)
        return
    most = DOCUMENT_ROWS * max_row_bytes
    with _opened(path) as file:
        try:
            text = file.read(most + 1)
            if len(text) > most:
                raise UserError(
                    f"{path}: a JSON document of more than {most:,} bytes has to be held in memory at once. "
                    "Convert it to JSON lines (jq -c '.[]'), or raise max_row_bytes."
                )
            document, twice = parse_json(text)
        except (*READ_ERRORS, ValueError, RecursionError) as error:
            raise UserError(
                f"{path}: not a JSON document: {_reason(error)}. JSON lines should end in .jsonl."
            ) from error
    if isinstance(document, dict):
        document = _list_inside(document)
    if not isinstance(document, list):
        raise UserError(f"{path}: a JSON {type(document).__name__}, where an array of objects is needed.")
    for number, value in enumerate(document, start=1):
        yield _object_row(path, number, value, twice)


def _list_inside(document: dict[str, Any]) -> list[Any]:
    """Return the rows of `{"data": [...]}`; any other object is one row (MATH has a file for each problem)."""
    lists = {key: value for key, value in document.items() if isinstance(value, list)}
    ((key, rows), *others) = [*lists.items(), ("", [document])]
    one = (
        not isinstance(document, Twice)
        and len(others) == 1
        and key not in LISTS_OF_A_ROW
        and rows
        and all(isinstance(r, dict) for r in rows)
    )
    return rows if one else [document]


def csv_rows(path: Path, max_row_bytes: int, delimiter: str = ",") -> Iterator[Row]:
    """CSV with a header; every value stays text. A row with more or fewer fields than the header is a problem."""
    limit = csv.field_size_limit(max_row_bytes)  # a setting of the process: put back below
    try:
        with _opened(path) as file:
            reader = csv.reader(_text_lines(path, file, max_row_bytes), delimiter=delimiter, strict=True)
            header = _csv_header(path, reader, delimiter)
            while True:
                number = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield Row(path, number, problem=f"not CSV: {error}")
                    continue
                if fields:
                    yield _csv_row(path, number, header, fields)
    finally:
        csv.field_size_limit(limit)


def _csv_header(path: Path, reader: Iterator[list[str]], delimiter: str) -> list[str]:
    try:
        header = next((fields for fields in reader if fields), [])
    except csv.Error as error:
        raise UserError(f"{path}: the header is not CSV: {error}.") from error
    if any("\udc80" <= character <= "\udcff" for name in header for character in name):
        raise UserError(f"{path}: the header is not UTF-8. Convert the file: iconv -t UTF-8.")
    for other, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(header) == 1 and other != delimiter and other in header[0]:
            raise UserError(
                f"{path}: one column, {header[0]!r}: is it separated by {name}? Set delimiter, or use commas."
            )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"{path}: two columns are named {twice[0]!r}.")
    return header


def _csv_row(path: Path, number: int, header: list[str], fields: list[str]) -> Row:
    if len(fields) != len(header):
        return Row(path, number, problem=f"{len(fields)} fields, the header has {len(header)}")
    if any("\udc80" <= c <= "\udcff" for field in fields for c in field):
        return Row(path, number, problem="not UTF-8")
    return Row(path, number, dict(zip(header, fields, strict=True)))


def _json_row(path: Path, number: int, line: bytes) -> Row:
    try:
        return _object_row(path, number, *parse_json(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Row(path, number, problem=f"not UTF-8: byte {line[error.start]:#04x} at {error.start}")
    except (ValueError, RecursionError) as error:
        return Row(path, number, problem=f"not JSON: {_reason(error)}")


def _object_row(path: Path, number: int, value: Any, twice: bool) -> Row:
    if isinstance(value, dict):
        problem = repeated_key(value) if twice else None
        return Row(path, number, value) if problem is None else Row(path, number, problem=problem)
    return Row(path, number, problem=f"a JSON {type(value).__name__}, where an object is needed")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _too_long(max_row_bytes: int) -> str:
    return f"longer than {max_row_bytes:,} bytes (max_row_bytes)"


def check_file(path: Path) -> None:
    """Raise UserError for a file that is missing, empty, a Git LFS pointer, or gzip under another name."""
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    try:
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}.") from error
    if not head:
        raise UserError(f"{path}: the file is empty.")
    if head.startswith(LFS_POINTER):
        raise UserError(f"{path}: a Git LFS pointer, not the data. Run `git lfs pull` in its folder.")
    if head.startswith(GZIP_MAGIC) and path.suffix != ".gz":
        raise UserError(f"{path}: gzip-compressed. Rename it to {path.name}.gz, or decompress it.")
    if not head.startswith(GZIP_MAGIC) and path.suffix == ".gz":
        raise UserError(f"{path}: not gzip-compressed, though its name ends in .gz.")
    for mark, encoding in WIDE_MARKS.items():
        if head.startswith(mark):
            raise UserError(f"{path}: encoded as {encoding}. Convert it: iconv -f {encoding} -t UTF-8.")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    check_file(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb", buffering=1 << 20) as file:
        yield file  # type: ignore[misc]


def _lines(path: Path, file: IO[bytes], max_row_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line) of a file; None for a line that is too long, which is never held in memory."""
    number = 0
    try:
        while line := file.readline(max_row_bytes + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > max_row_bytes and not line.endswith(b"\n"):
                while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            else:
                yield number, line
    except READ_ERRORS as error:
        raise UserError(f"{path}, row {number + 1}: the file can't be read any further: {error}.") from error


def _text_lines(path: Path, file: IO[bytes], max_row_bytes: int) -> Iterator[str]:
    """Yield lines for the CSV reader: bytes that aren't UTF-8 become lone surrogates, which `_csv_row` finds."""
    for number, line in _lines(path, file, max_row_bytes):
        if line is None:
            raise UserError(f"{path}, row {number}: {_too_long(max_row_bytes)}.")
        yield line.decode("utf-8", "surrogateescape")


def _begins_json_lines(path: Path, max_row_bytes: int) -> bool:
    """Return whether the first of several lines is an object; a single one is a document, whose rows may be inside."""
    with _opened(path) as file:
        filled = (line for _, line in _lines(path, file, max_row_bytes) if line is None or line.strip())
        first, second = next(filled, None), next(filled, b"")
    try:
        return second != b"" and first is not None and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False
