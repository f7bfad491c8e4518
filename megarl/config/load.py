"""From YAML files and `key.sub=value` words to a checked `Config`.

A file may begin with `defaults: [other.yaml, ...]` (paths relative to itself): those are read first, in order, and
the file's own keys are laid over them. Command-line words come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megarl.config.rules import check_rules
from megarl.config.schema import Config
from megarl.errors import UserError, did_you_mean


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, override, check. Raises UserError that names the file or key and what to do."""
    merged = _override(_read(Path(path), ()), overrides)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from error
    return make_config(values, where=str(path))


def make_config(values: Any, *, where: str = "config") -> Config:
    """A `Config` from plain values. Raises UserError for the first thing that is wrong."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error)}") from None
    check_rules(config, where=where)
    return config


def to_yaml(config: Config) -> str:
    """The resolved configuration; reading it back gives the same one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, above: tuple[Path, ...]) -> DictConfig:
    """One file with its defaults under it."""
    resolved = path.resolve()
    if resolved in above:
        raise UserError(
            f"{path}: its defaults lead back to it: {' -> '.join(p.name for p in (*above, resolved))}"
        )
    try:
        own = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a YAML file") from None
    except OSError as error:  # omegaconf's own for a file that holds one bare value has no strerror
        raise UserError(f"{path}: cannot be read as YAML ({error.strerror or error})") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(own, DictConfig):
        raise UserError(f"{path}: must hold keys and values, not a list")
    defaults = own.pop("defaults", [])
    if not isinstance(defaults, list | ListConfig) or not all(isinstance(d, str) for d in defaults):
        raise UserError(f"{path}: `defaults` must be a list of file names")
    below = [_read(path.parent / name, (*above, resolved)) for name in defaults]
    merged = OmegaConf.create({})
    try:
        for layer in (*below, own):
            merged = _lay_over(merged, layer)
    except (OmegaConfBaseException, TypeError) as error:
        raise UserError(f"{path}: does not fit what its defaults say: {_first_line(error)}") from error
    return merged


def _lay_over(base: DictConfig, layer: DictConfig) -> DictConfig:
    """`layer` over `base`, key by key. A section whose `kind` changes, and another algorithm, start anew: the
    settings of one engine or recipe mean nothing to another."""
    base, layer = base.copy(), layer.copy()
    if isinstance(layer.get("algorithm"), str):
        layer.algorithm = {"name": layer.algorithm}
    for key in ("algorithm", "engine"):
        after = _identity(layer, key)
        if after is not None and _identity(base, key) != after:
            base.pop(key, None)
    merged = OmegaConf.merge(base, layer)
    assert isinstance(merged, DictConfig)
    return merged


def _identity(config: DictConfig, key: str) -> Any:
    """What a section is of: its kind, or the algorithm's name."""
    section = config.get(key)
    return section.get("kind", section.get("name")) if isinstance(section, DictConfig) else None


WHOLE = ("algorithm", "algorithm.name", "engine", "engine.kind")


def _override(config: DictConfig, words: Sequence[str]) -> DictConfig:
    """Lay `key.sub=value` words over the config; values are YAML. Words that may start a section anew come first, so
    that none of the others is lost by its place."""
    for word in sorted(words, key=lambda word: word.partition("=")[0] not in WHOLE):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"{word!r}: an override is written key.sub=value, for example rl.steps=20")
        try:
            value = OmegaConf.from_dotlist([f"value={text}"]).value
            if key in WHOLE:
                config = _lay_over(config, OmegaConf.from_dotlist([word]))
            else:
                OmegaConf.update(config, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, yaml.YAMLError, TypeError, AttributeError) as error:
            raise UserError(f"override {word!r}: {_first_line(error)}") from error
    return config


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _explain(error: ValidationError) -> str:
    """One sentence for the first error: the key, what is wrong, what was probably meant."""
    first = error.errors(include_url=False)[0]
    path = _without_tags(first["loc"])
    key = ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        return _unknown([str(part) for part in path], _keys_at(path[:-1]))
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = first["ctx"].get("tag")
        kinds = ", ".join(sorted(_kinds_at(path)))
        return f"the key '{key}.kind' " + (
            f"is {given!r}, it must be one of {kinds}" if given else f"is missing: one of {kinds}"
        )
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower() + message[1:]} (got {_shorten(first['input'])})"


def _without_tags(location: Sequence[Any]) -> list[Any]:
    """pydantic's location without the names of the union variants it tried: keys, names and list numbers only."""
    path: list[Any] = []
    for number, part in enumerate(location):
        is_last = number == len(location) - 1
        models, name_follows = _below(path)
        if is_last or isinstance(part, int) or name_follows or any(part in m.model_fields for m in models):
            path.append(part)
    return path


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _below(path: Sequence[Any]) -> tuple[list[type[BaseModel]], bool]:
    """The sections that may stand at this path, over all variants that a union offers there, and whether a name that
    the user gives comes next (`data.evaluations.aime`). Numbers in lists are passed over."""
    models: list[type[BaseModel]] = [Config]
    name_follows = False
    for part in path:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        if isinstance(part, int) or part.isdecimal() or (name_follows and not fields):
            name_follows = False
            continue
        models = list(dict.fromkeys(inner for field in fields for inner in _models_of(field)))
        name_follows = bool(models) and any(get_origin(field.annotation) is dict for field in fields)
    return models, name_follows


def _keys_at(path: Sequence[Any]) -> set[str]:
    """Keys that may stand below this path."""
    return {name for m in _below(path)[0] for name in m.model_fields}


def _kinds_at(path: Sequence[Any]) -> set[str]:
    """The words that `kind` may be there."""
    fields = [m.model_fields["kind"] for m in _below(path)[0] if "kind" in m.model_fields]
    return {word for field in fields for word in get_args(field.annotation)}


def _models_of(field: FieldInfo) -> Iterator[type[BaseModel]]:
    def walk(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for argument in getattr(annotation, "__args__", ()):
            yield from walk(argument)

    yield from walk(field.annotation)


def describe_key(key: str) -> str:
    """What a key means, the words it takes and its default; of a section, what may stand in it.

    Raises UserError for an unknown key, with the nearest ones.
    """
    parts = key.split(".")
    for depth, part in enumerate(parts):
        models, name_follows = _below(parts[:depth])
        known = {name for m in models for name in m.model_fields}
        if not (part in known or name_follows or (part.isdecimal() and depth)):
            raise UserError(_unknown(parts[: depth + 1], known))
    section, name_follows = _below(parts)
    if section and (parts[-1].isdecimal() or _below(parts[:-1])[1]):
        return _describe_section(key, section)  # one of a list, or one that the user named
    lines = []
    for model in _below(parts[:-1])[0]:
        if field := model.model_fields.get(parts[-1]):
            words = [repr(word) for word in _words_of(field.annotation)]
            if len(words) == 1:  # the kind of one variant
                told, choice = f"={words[0]}", ""
            else:
                told = "" if section else f" ({_default(parts, model, field)})"
                choice = f" One of {', '.join(words)}." if words else ""
            lines.append(f"{key}{told}: {field.description or model.__doc__ or ''}{choice}")
    return "\n".join([*dict.fromkeys(lines), *([_describe_section(key, section)] if section else [])])


def _unknown(parts: Sequence[str], known: set[str]) -> str:
    key, above = ".".join(parts), ".".join(parts[:-1])
    if above == "algorithm":
        return f"{key}: the parts of a recipe are listed, with their defaults, by `megarl algorithms NAME`"
    if above and not known:
        return (
            f"unknown key {key!r}: {above} has no keys of megarl's own, see `megarl config explain {above}`"
        )
    return f"unknown key {key!r}.{did_you_mean(parts[-1], known)} Known there: {', '.join(sorted(known))}"


def _describe_section(key: str, models: Sequence[type[BaseModel]]) -> str:
    lines = []
    for model in models:
        lines.append(f"{key}: {' '.join((model.__doc__ or '').split())}")
        lines += [f"  {name}: {field.description or ''}" for name, field in model.model_fields.items()]
    return "\n".join(lines)


def _words_of(annotation: Any) -> list[Any]:
    """The words that a key takes, where it takes only these."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for argument in get_args(annotation) for word in _words_of(argument)]


def _default(parts: Sequence[str], model: type[BaseModel], field: FieldInfo) -> str:
    """A key's default in its place: `sft.optimizer` begins with other numbers than `rl.optimizer`."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    place: Any = Config.model_fields[parts[0]].get_default(call_default_factory=True)
    for part in parts[1:-1]:
        place = getattr(place, part, None)
    if len(parts) > 1 and isinstance(place, model):
        value = getattr(place, parts[-1])
    return f"default {value!r}"


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, dotted, in the order of the schema."""
    for name, field in model.model_fields.items():
        inner = list(_models_of(field))
        if not inner:
            yield prefix + name
        for section in inner:
            yield from all_keys(section, f"{prefix}{name}.")
