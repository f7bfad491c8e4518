"""JSON of data files, more strictly than Python reads it: a key stands once in an object, half a character is found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_HALF = re.compile(r"[\ud800-\udfff]")  # JSON can spell half a character: "\ud800"


class Twice(dict[str, Any]):
    """An object that says a key twice."""

    key: str


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for what is not JSON, and for an object that repeats a key."""
    value, twice = parse_json(text)
    if twice and (problem := repeated_key(value)) is not None:
        raise ValueError(problem)
    return value


def parse_json(text: str | bytes) -> tuple[Any, bool]:
    """Return the value of a JSON text, and whether one of its objects, a `Twice`, repeats a key. Raises ValueError."""
    twice = False

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        twice, found, names = True, Twice(found), [name for name, _ in pairs]
        found.key = next(name for name in found if names.count(name) > 1)
        return found

    return json.loads(text, object_pairs_hook=made), twice


def repeated_key(value: Any, place: str = "") -> str | None:
    """Tell which key is there twice in an object somewhere in a value; None = none."""
    if isinstance(value, Twice):
        return f"the key {value.key!r} is there twice{f' in {place}' if place else ''}"
    return next(filter(None, (repeated_key(part, name) for name, part in _parts(value, place))), None)


def half_character(value: Any, place: str = "") -> str | None:
    """Tell which text in a value holds half a character; None = none does."""
    if isinstance(value, str):
        half = _HALF.search(value)
        return (
            f"{place or 'the text'} is not valid Unicode: half a character at {half.start()}"
            if half
            else None
        )
    return next(filter(None, (half_character(part, name) for name, part in _parts(value, place))), None)


def _parts(value: Any, place: str) -> list[tuple[str, Any]]:
    """Return what an object or a list holds, its keys too, and where."""
    if isinstance(value, Mapping):
        keys = [(f"a key{f' of {place}' if place else ''}", key) for key in value if isinstance(key, str)]
        return [*keys, *((f"{place}.{key}" if place else repr(key), part) for key, part in value.items())]
    if isinstance(value, list | tuple):
        return [(f"{place}[{i}]", part) for i, part in enumerate(value)]
    return []
