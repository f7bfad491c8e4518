"""Every key of the configuration, read off the schema: for `megarl config explain`, docs/config.md, and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from megarl.config.schema import Config
from megarl.errors import UserError, did_you_mean
from megarl.settings import Section, expand_home

NUMBER, NAME = "<n>", "<name>"  # stand for a place in a list, and for a name that the user gives


class Key(NamedTuple):
    """A key in its place.

    parent: the keys above it, for example ("data", "sources", "<n>"). section: the class that declares it; where one of
    several kinds may stand, each declares its own keys. default: the one of this place (sft.optimizer has others than
    rl.optimizer).
    """

    parent: tuple[str, ...]
    leaf: str
    section: type[Section]
    field: FieldInfo
    default: Any

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.parent, self.leaf)

    @property
    def words(self) -> list[str]:
        """The words that it takes, where it takes only these."""
        return [a for a in _innermost(self.field.annotation) if isinstance(a, str)]

    @property
    def is_path(self) -> bool:
        """Whether it is a path, in which `~` is a home folder."""
        kinds = (*self.field.metadata, *_innermost(self.field.annotation))
        return any(getattr(kind, "func", None) is expand_home for kind in kinds)

    @property
    def sections(self) -> list[type[Section]]:
        """The sections of which one may stand in it."""
        return [
            a for a in _innermost(self.field.annotation) if isinstance(a, type) and issubclass(a, Section)
        ]

    @property
    def below(self) -> tuple[str, ...]:
        """The parent of the keys in its sections."""
        origin = get_origin(self.field.annotation)
        return (*self.path, *([NUMBER] if origin is tuple else [NAME] if origin is dict else []))


def _innermost(annotation: Any) -> Iterator[Any]:
    """Yield the classes that a type is made of, and the words of its literals."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal or not parts:
        yield from parts or (annotation,)
    else:
        for part in parts:
            yield from _innermost(part)


def all_keys(
    section: type[Section] = Config, parent: tuple[str, ...] = (), place: object = None
) -> Iterator[Key]:
    """Yield every key, and after it those of its sections; a section's own keys come before inherited ones.

    place: the section's values in this place by default, if there are any.
    """
    for leaf in sorted(section.model_fields, key=lambda name: name not in section.__annotations__):
        field = section.model_fields[leaf]
        default = field.get_default(call_default_factory=True)
        key = Key(
            parent, leaf, section, field, getattr(place, leaf) if isinstance(place, section) else default
        )
        yield key
        for inner in key.sections:
            yield from all_keys(inner, key.below, key.default)


def _matches(path: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the parts name what is at this path; list numbers and the user's names may be left out."""
    if path and path[0] in (NUMBER, NAME):
        taken = parts and (path[0] == NAME or parts[0] == NUMBER or parts[0].isdecimal())
        return bool(taken and _matches(path[1:], parts[1:])) or _matches(path[1:], parts)
    return list(path) == list(parts) or bool(
        path and parts and path[0] == parts[0] and _matches(path[1:], parts[1:])
    )


def find(parts: Sequence[str]) -> tuple[list[Key], list[Key]]:
    """Return the keys of this name, one for each kind that declares it, and the keys that stand right below it."""
    keys = list(all_keys())
    return [k for k in keys if _matches(k.path, parts)], [k for k in keys if _matches(k.parent, parts)]


def unknown_key(parts: Sequence[str]) -> str:
    """Return what to tell about a key that is none: where it goes wrong, and what was probably meant."""
    depth = next((n for n in range(len(parts)) if not any(find(parts[: n + 1]))), None)
    if depth is None:
        kinds = " or ".join(str(k.section.model_fields["kind"].default) for k in find(parts)[0])
        return f"the key {'.'.join(parts)!r} belongs to {'.'.join(parts[:-1])}.kind={kinds}"
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
    """Return what a key means, the words it takes and its default; of a section, what may stand in it.

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
    """Return a section's docstring on one line."""
    return " ".join((section.__doc__ or "").split())
