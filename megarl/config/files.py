"""The files that a configuration names: missing ones are told by key and path before anything is opened."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import Config
from megarl.errors import UserError


def check_files(config: Config) -> None:
    """Raises UserError for the model's folder or the demonstrations, where there are none."""
    if not Path(str(config.model.path)).is_dir():
        raise UserError(
            f"model.path: {config.model.path}: no such folder.{_how_to_make(str(config.model.path))}"
        )
    demonstrations = config.sft.demonstrations
    if config.sft.steps and demonstrations and not Path(demonstrations.path).expanduser().exists():
        raise UserError(
            f"sft.demonstrations.path: {demonstrations.path}: no such file.{_how_to_make(demonstrations.path)}"
        )


def _how_to_make(path: str) -> str:
    """What makes an example's files: the `make.py` of its folder."""
    folders = (folder for folder in Path(path).parents if "examples" in folder.parts)
    script = next((folder / "make.py" for folder in folders if (folder / "make.py").is_file()), None)
    return f" `python {script}` makes it." if script else ""
