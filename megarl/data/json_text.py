"""JSON from data files, strictly: an object may say a key only once, and a text may not hold half a character."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HALF = re.compile(r"[\ud800-\udfff]")  # JSON can spell half a character: "\ud800"


class Twice(dict[str, Any]):
    """An object that says a key twice."""

    key: str


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for what is not JSON, and for a flaw in it."""
    value, suspicious = parse_json(text)
    if suspicious and (problem := flaw(value)) is not None:
        raise ValueError(problem)
    return value


def parse_json(text: str | bytes) -> tuple[Any, bool]:
    """Return the value of a JSON text, and whether it may have flaws. Raises ValueError for what is not JSON."""
    twice = False

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        twice, found, names = True, Twice(found), [name for name, _ in pairs]
        found.key = next(name for name in found if names.count(name) > 1)
        return found

    value = json.loads(text, object_pairs_hook=made)
    return value, twice or (b"\\u" in text if isinstance(text, bytes) else "\\u" in text)


def flaw(value: Any, place: str = "") -> str | None:
    """Return what is wrong with a JSON value: a repeated key, or a text that holds half a character; None = nothing."""
    if isinstance(value, str):
        half = HALF.search(value)
        return (
            f"{place or 'the text'} is not valid Unicode: half a character at {half.start()}"
            if half
            else None
        )
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        if isinstance(value, Twice):
            return f"the key {value.key!r} is there twice{f' in {place}' if place else ''}"
        if any(HALF.search(key) for key in value):
            return f"a key{f' of {place}' if place else ''} is not valid Unicode: half a character"
        parts = [(f"{place}.{key}" if place else repr(key), part) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{place}[{i}]", part) for i, part in enumerate(value)]
    return next((found for name, part in parts if (found := flaw(part, name)) is not None), None)
