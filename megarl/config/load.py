"""From YAML files and `key.sub=value` words to a checked `Config`.

A file may begin with `defaults: [other.yaml, ...]` (paths relative to itself): those are read first, in order, and
the file's own keys are laid over them. Command-line words come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megarl.config.keys import find, unknown_key
from megarl.config.rules import check_rules
from megarl.config.schema import Config
from megarl.errors import UserError
from megarl.settings import user_path


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, override, check. Raises UserError that names the file or key and what to do."""
    merged = _override(_read(user_path(path), ()), overrides)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from error
    return make_config(values, where=str(path))


def make_config(values: Any, *, where: str = "config") -> Config:
    """Make a `Config` from plain values. Raises UserError for the first thing that is wrong."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error, values)}") from None
    check_rules(config, where=where)
    return config


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML; reading it back gives the same one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, above: tuple[Path, ...]) -> DictConfig:
    """Read one file with its defaults under it."""
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
    below = [
        _read(path.parent / user_path(name, f"{path}: defaults"), (*above, resolved)) for name in defaults
    ]
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
    """Return what a section is of: its kind, or the algorithm's name."""
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


def _explain(error: ValidationError, values: Any) -> str:
    """Return one sentence for the first error: the key, what is wrong, what was probably meant."""
    first = error.errors(include_url=False)[0]
    parts = _as_written(first["loc"], values)
    key = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return unknown_key(parts)
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = first["ctx"].get("tag")
        kinds = ", ".join(sorted({word for k in find([*parts, "kind"])[0] for word in k.words}))
        return f"the key '{key}.kind' " + (
            f"is {given!r}, it must be one of {kinds}" if given else f"is missing: one of {kinds}"
        )
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower() + message[1:]} (got {_shorten(first['input'])})"


def _as_written(location: Sequence[str | int], values: Any) -> list[str]:
    """Return the keys of pydantic's location, without the names of the union variants that it tried."""
    *above, last = location
    parts = []
    for part in above:
        try:
            values = values[part]
        except (LookupError, TypeError):
            continue
        parts.append(str(part))
    return [*parts, str(last)]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
