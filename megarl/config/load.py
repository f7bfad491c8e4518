"""From YAML files and `key.sub=value` words to a checked `Config`.

A file may begin with `defaults: [other.yaml, ...]` (paths relative to itself): those are read first, in order, and
the file's own keys are laid over them. Command-line words come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
        known = sorted(_keys_at(Config, path[:-1]))
        return f"unknown key {key!r}.{did_you_mean(str(path[-1]), known)} Known there: {', '.join(known)}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower() + message[1:]} (got {_shorten(first['input'])})"


def _without_tags(location: Sequence[Any]) -> list[Any]:
    """pydantic's location without the names of the union variants it tried: keys and list numbers only."""
    path: list[Any] = []
    for number, part in enumerate(location):
        is_last = number == len(location) - 1
        if is_last or isinstance(part, int) or part in _keys_at(Config, path):
            path.append(part)
    return path


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys_at(model: type[BaseModel], path: Sequence[Any]) -> set[str]:
    """Keys that may stand below this path, over all variants a union offers there."""
    models = [model]
    for part in path:
        if isinstance(part, int):
            continue
        models = [
            inner for m in models if part in m.model_fields for inner in _models_of(m.model_fields[part])
        ]
    return {name for m in models for name in m.model_fields}


def _models_of(field: FieldInfo) -> Iterator[type[BaseModel]]:
    def walk(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for argument in getattr(annotation, "__args__", ()):
            yield from walk(argument)

    yield from walk(field.annotation)


def describe_key(key: str) -> str:
    """What a key means, its type and default. Raises UserError for an unknown key, with the nearest ones."""
    parts = key.split(".")
    known = _keys_at(Config, parts[:-1])
    if parts[-1] not in known:
        raise UserError(f"unknown key {key!r}.{did_you_mean(parts[-1], known)}")
    models: list[type[BaseModel]] = [Config]
    for part in parts[:-1]:
        models = [
            inner for m in models if part in m.model_fields for inner in _models_of(m.model_fields[part])
        ]
    lines = []
    for model in models:
        if field := model.model_fields.get(parts[-1]):
            default = (
                "required"
                if field.is_required()
                else f"default {field.get_default(call_default_factory=True)!r}"
            )  # type: ignore[call-arg]
            lines.append(f"{key} ({default}): {field.description or ''}")
    return "\n".join(dict.fromkeys(lines))


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, dotted, in the order of the schema."""
    for name, field in model.model_fields.items():
        inner = list(_models_of(field))
        if not inner:
            yield prefix + name
        for section in inner:
            yield from all_keys(section, f"{prefix}{name}.")
