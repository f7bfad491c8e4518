"""`docs/config.md`, made from the schema: `python -m megarl.config.docs [PATH]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from megarl.config.keys import Key, all_keys, summary
from megarl.monitor.files import write_atomic

HEADER = """# Configuration

Made from the schema by `python -m megarl.config.docs`; edit a room's `settings.py`, or `megarl/config/schema.py`.
A test holds this page to the schema: a new key is a decision.

Every key of a run's YAML file is here. On the command line a key is set with `key.sub=value`, for example
`data.sources.0.weight=2`: `<n>` stands for a place in a list, counted from 0, `<name>` for a name that you choose.
`megarl config explain KEY` tells the same of one key, and `megarl config show FILE` prints all values of a run.
`None` is written `null`.
"""
TABLE = "\n| key | takes | default | meaning |\n|---|---|---|---|"
TYPES = {
    bool: "true, false",
    int: "integer",
    float: "number",
    str: "text",
    dict: "mapping",
    Mapping: "mapping",
}
BOUNDS = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}", "min_length": "at least {} long"}


def render() -> str:
    """Return the whole page."""
    keys, told = list(all_keys()), dict[str, str]()
    rooms = [key for key in keys if key.sections and not key.parent]
    parts = [HEADER, "## The run", TABLE, *(_row(k) for k in keys if not k.parent and k not in rooms)]
    for room in rooms:
        head = " ".join(summary(section) for section in room.sections)
        parts += [f"\n## `{room.leaf}`\n\n{head}", TABLE, *_rows(room, keys, told)]
    return "\n".join(parts) + "\n"


def _rows(above: Key, keys: list[Key], told: dict[str, str]) -> list[str]:
    """Return the rows of the keys in a section. told: rows, without the section's name -> the section that had them."""
    rows = []
    for key in (k for k in keys if k.parent == above.below):
        below = _rows(key, keys, told) if key.sections else []
        name = ".".join(key.below)
        first = told.setdefault("\n".join(below).replace(f"`{name}.", "`"), name) if below else name
        rows.append(_row(key, note="" if first == name else f" It has the keys of `{first}`."))
        rows += below if first == name else []
    return rows


def _row(key: Key, note: str = "") -> str:
    value = list(key.default) if isinstance(key.default, tuple) else key.default
    default = "required" if key.field.is_required() else "" if key.sections else f"`{value!r}`"
    cells = (f"`{'.'.join(key.path)}`", _takes(key), default, f"{key.field.description}{note}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(key: Key) -> str:
    bounds = [
        text.format(value)
        for limit in key.field.metadata
        for name, text in BOUNDS.items()
        if (value := getattr(limit, name, None)) is not None
    ]
    return ", ".join(["path" if key.is_path else _type(key.field.annotation), *bounds])


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in parts if part is not NoneType))
    if origin is tuple:
        return f"list of {_type(parts[0])}".replace("section", "sections").replace("number", "numbers")
    return TYPES.get(origin or annotation, "section")


if __name__ == "__main__":
    write_atomic(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/config.md"), render())
