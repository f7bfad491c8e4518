"""A room imports only from rooms above it (CONTRIBUTING.md, "How the code is laid out")."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MEGARL = Path(__file__).parents[1] / "megarl"
ROOMS = (
    *("errors", "settings", "seeds", "records", "algorithms", "data", "routing", "rewards", "monitor"),
    *("megatron", "weights", "rollout", "config", "training", "launcher", "cli"),
)


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of megarl that a file imports when it runs, not for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (name for other in node.orelse for name in imports(other))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from imports(node)


def test_a_room_imports_only_from_rooms_above_it() -> None:
    """Settings are the exception: the configuration composes those of every room."""
    wrong = []
    for file in MEGARL.rglob("*.py"):
        parts = file.relative_to(MEGARL).with_suffix("").parts
        if parts[0] not in ROOMS:
            assert parts[0] in ("__init__", "__main__"), f"{file} is in no room"
            continue
        for name in imports(ast.parse(file.read_text())):
            top, _, rest = name.partition(".")
            room = rest.split(".")[0]
            if top == "megarl" and room in ROOMS and ROOMS.index(room) > ROOMS.index(parts[0]):
                composes = parts[0] == "config" and ".settings." in name
                wrong += [] if composes else [f"{'/'.join(parts)} imports {name}"]
    assert not wrong
