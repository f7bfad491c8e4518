"""Where the rows of a source are: a file, a folder of files, or a folder written by Hugging Face `datasets`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megarl.data.rows import Row, check_file, csv_rows, json_line_rows, json_rows
from megarl.errors import UserError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_READABLE = ", ".join(dict.fromkeys(kind for kind in FORMATS.values() if kind != "arrow"))
NO_DATA = ("dataset_infos.json", "dataset_info.json", "state.json", "config.json")
SPLITS = ("train", "validation", "valid", "val", "dev", "test")


def read_rows(
    path: Path,
    *,
    format: str | None = None,
    split: str | None = None,
    delimiter: str = ",",
    max_row_bytes: int = 64 << 20,
) -> Iterator[Row]:
    """Yield all rows of a source in order, with those that can't be read among them.

    path: a file, a folder of files (a downloaded dataset repository) or a `save_to_disk` folder.
    format: one of jsonl, json, csv, tsv, parquet; None = by the name's ending.
    split: which split of a folder; needed if it holds more than one.
    Raises UserError for what can't be read at all, and for a source without a single row.
    """
    some = False
    for row in _rows(path, format, split, delimiter, max_row_bytes):
        some = True
        yield row
    if not some:
        raise UserError(f"{path}: holds no rows.")


def _rows(
    path: Path, format: str | None, split: str | None, delimiter: str, max_row_bytes: int
) -> Iterator[Row]:
    if os.path.isdir(path) and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        yield from _saved_rows(path, split)
        return
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        "jsonl": lambda file: json_line_rows(file, max_row_bytes),
        "json": lambda file: json_rows(file, max_row_bytes),
        "csv": lambda file: csv_rows(file, max_row_bytes, delimiter),
        "tsv": lambda file: csv_rows(file, max_row_bytes, "\t"),
        "parquet": _parquet_rows,
    }
    if format is not None and format not in readers:
        raise UserError(f"format {format!r} is not known: set one of {_READABLE}.")
    for file in source_files(path, format, split):
        yield from readers[format or file_format(file)](file)


def file_format(path: Path) -> str:
    """Return the format that a file's name promises. Raises UserError for an unknown ending."""
    ending, found = _ending(path)
    if found is None:
        raise UserError(f"{path}: unknown ending {ending!r}. Set format to one of {_READABLE}.")
    if found == "arrow":
        raise UserError(
            f"{path}: a part of a folder that `save_to_disk` wrote. Name the folder, not a file in it."
        )
    return found


def source_files(path: Path, format: str | None = None, split: str | None = None) -> list[Path]:
    """Return the files of a source in order: the file itself, or the data files of a folder and its split."""
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such file or folder.")
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.name not in NO_DATA
        and (found := _ending(file)[1]) not in (None, "arrow")
        and format in (None, found)
    ]
    if not files:
        raise UserError(f"{path}: the folder holds no data files ({', '.join(FORMATS)}).")
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    if split is not None:
        if split not in by_split:
            has = ", ".join(sorted(str(s) for s in by_split if s)) or "none"
            raise UserError(f"{path}: no files of split {split!r}. Splits: {has}.")
        return by_split[split]
    if len(by_split) > 1:
        has = ", ".join(sorted(s or "files of none" for s in by_split))
        raise UserError(f"{path}: files of several splits ({has}). Set split, or name the files of one.")
    return files


def _ending(path: Path) -> tuple[str, str | None]:
    """Return a file's ending, without .gz, and the format that it promises."""
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return ending, FORMATS.get(ending.lower())


def _split_of(file: Path) -> str | None:
    """Return the split that a path names by a word in it (`train-00000-of-00002.parquet`, `data/test/0.json`)."""
    words = [word for part in file.parts for word in re.split(r"[^A-Za-z]+", part)]
    return next((split for split in SPLITS if split in words), None)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    check_file(path)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"{path}: two columns are named {twice[0]!r}.")
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(path, number, _as_written(value))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}, row {number + 1}: not readable as parquet: {error}") from error


def _saved_rows(path: Path, split: str | None) -> Iterator[Row]:
    """Yield rows of a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises many kinds for a damaged folder
        raise UserError(f"{path}: not readable as a saved dataset: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split is None and len(loaded) > 1:
            raise UserError(
                f"{path}: holds several splits ({', '.join(loaded)}). Set split, or name the folder of one."
            )
        if split is not None and split not in loaded:
            raise UserError(f"{path}: no split {split!r}. Splits: {', '.join(loaded)}.")
        loaded = loaded[split or next(iter(loaded))]
    for number, value in enumerate(loaded.with_format(None), start=1):
        yield Row(path, number, _as_written(value))


def _as_written(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table's row without the nulls with which it fills what one message, call or tool lacks and others have;
    a message keeps its content."""
    return {column: _unfilled(value) if _speaks(value) else value for column, value in row.items()}


def _speaks(value: Any) -> bool:
    """Whether a column holds messages or tools."""
    return isinstance(value, list) and any(
        isinstance(part, dict) and part.keys() & {"role", "from", "function", "parameters"} for part in value
    )


def _unfilled(value: Any) -> Any:
    if isinstance(value, list):
        return [_unfilled(part) for part in value]
    if isinstance(value, dict):
        return {k: _unfilled(v) for k, v in value.items() if v is not None or k in ("content", "value")}
    return value
