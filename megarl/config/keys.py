"""Every key of the configuration, read off the schema: for `megarl config explain`, docs/config.md, and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megarl.config.schema import Config
from megarl.errors import UserError, did_you_mean
from megarl.settings import Section

NUMBER, NAME = "<n>", "<name>"  # stand for a place in a list, and for a name that the user gives


@dataclass(frozen=True)
class Key:
    """A key in its place.

    section: the class that declares it, one of several where the place takes one of several kinds. parent: the keys
    above it, ("data", "sources", "<n>"). default: the value in this place, which another place may set otherwise.
    """

    section: type[Section]
    parent: tuple[str, ...]
    leaf: str
    field: FieldInfo
    default: Any

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.parent, self.leaf)

    @property
    def words(self) -> list[str]:
        """The words that it takes, where it takes only these."""
        return [a for a in _arguments(self.field.annotation) if isinstance(a, str)]

    @property
    def sections(self) -> list[type[Section]]:
        """What may stand in it: a section, or one of several kinds."""
        return [
            a for a in _arguments(self.field.annotation) if isinstance(a, type) and issubclass(a, Section)
        ]

    @property
    def below(self) -> tuple[str, ...]:
        """The parent of the keys in its sections."""
        wild = {tuple: (NUMBER,), dict: (NAME,)}.get(get_origin(self.field.annotation), ())  # type: ignore[arg-type]
        return (*self.path, *wild)


def _arguments(annotation: Any) -> Iterator[Any]:
    """The innermost parts of a type: classes, and the words of its literals."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal or not parts:
        yield from parts or (annotation,)
    else:
        for part in parts:
            yield from _arguments(part)


def all_keys(
    section: type[Section] = Config, parent: tuple[str, ...] = (), instance: Any = None
) -> Iterator[Key]:
    """Every key, each section's before those of the sections in it, a section's own before inherited ones.

    instance: the section's defaults in this place, if it has any.
    """
    for leaf in sorted(section.model_fields, key=lambda name: name not in section.__annotations__):
        field = section.model_fields[leaf]
        default = field.get_default(call_default_factory=True)
        key = Key(
            section,
            parent,
            leaf,
            field,
            getattr(instance, leaf) if isinstance(instance, section) else default,
        )
        yield key
        for inner in key.sections:
            yield from all_keys(inner, key.below, key.default)


def _matches(path: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the parts name the key at this path; list numbers and the user's names may be left out."""
    if path and path[0] in (NUMBER, NAME):
        taken = parts and (path[0] == NAME or parts[0].isdecimal() or parts[0] == NUMBER)
        return bool(taken and _matches(path[1:], parts[1:])) or _matches(path[1:], parts)
    if not path or not parts:
        return not path and not parts
    return path[0] == parts[0] and _matches(path[1:], parts[1:])


def find(parts: Sequence[str]) -> tuple[list[Key], list[Key]]:
    """Return the keys of this name, one for each kind that declares it, and the keys that stand right below it."""
    keys = list(all_keys())
    return [k for k in keys if _matches(k.path, parts)], [k for k in keys if _matches(k.parent, parts)]


def unknown_key(parts: Sequence[str]) -> str:
    """What to tell about a key that is none: where it goes wrong, and what was probably meant."""
    depth = next(n for n in range(len(parts)) if not any(find(parts[: n + 1])))
    key, above = ".".join(parts[: depth + 1]), ".".join(parts[:depth])
    known = {k.leaf for k in find(parts[:depth])[1]}
    if above == "algorithm":
        return f"{key}: the parts of a recipe are listed, with their defaults, by `megarl algorithms NAME`"
    if not known:
        return (
            f"unknown key {key!r}: {above} has no keys of megarl's own, see `megarl config explain {above}`"
        )
    return f"unknown key {key!r}.{did_you_mean(parts[depth], known)} Known there: {', '.join(sorted(known))}"


def describe_key(name: str) -> str:
    """What a key means, the words it takes and its default in its place; of a section, what may stand in it.

    Raises UserError for an unknown key, with the nearest ones.
    """
    here, below = find(name.split("."))
    if not here and not below:
        raise UserError(unknown_key(name.split(".")))
    lines = list(dict.fromkeys(_line(name, key) for key in here))
    if not here or here[0].sections:
        for section, keys in groupby(below, key=lambda key: key.section):
            lines += [
                f"{name}: {summary(section)}",
                *(f"  {key.leaf}: {key.field.description}" for key in keys),
            ]
    return "\n".join(lines)


def _line(name: str, key: Key) -> str:
    words = [repr(word) for word in key.words]
    if len(words) == 1:  # the kind of one variant
        return f"{name}={words[0]}: {key.field.description}"
    default = "required" if key.field.is_required() else f"default {key.default!r}"
    told = name if key.sections else f"{name} ({default})"
    return f"{told}: {key.field.description}" + (f" One of {', '.join(words)}." if words else "")


def summary(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring, on one line."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())
