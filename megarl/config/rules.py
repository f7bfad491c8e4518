"""Rules between sections, and the files that they name: refused before anything is loaded or started."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import Config
from megarl.errors import UserError


def check_rules(config: Config, *, where: str) -> None:
    """Raises UserError for the first broken rule: the key, why it is refused and what to do."""
    problem = None
    if config.model.path is None:
        problem = "model.path: the folder of a Hugging Face checkpoint must be set"
    elif config.sft.steps > 0 and config.sft.demonstrations is None:
        problem = (
            "sft.demonstrations: a cold start (sft.steps) needs something to learn from: set "
            "sft.demonstrations={path: ..., preset: messages}, or sft.steps=0"
        )
    elif (config.rewards.soft_overlong or 0) > config.sampling.max_new_tokens:
        problem = (
            "rewards.soft_overlong: the punishment would begin before the first token: at most "
            "sampling.max_new_tokens"
        )
    if problem:
        raise UserError(f"{where}: {problem}")


def check_files(config: Config) -> None:
    """Raises UserError for the model's folder or the demonstrations, where there are none."""
    model, demonstrations = str(config.model.path), config.sft.demonstrations
    if not Path(model).is_dir():
        raise UserError(f"model.path: {model}: no such folder.{_how_to_make(model)}")
    if config.sft.steps and demonstrations and not Path(demonstrations.path).exists():
        path = demonstrations.path
        raise UserError(f"sft.demonstrations.path: {path}: no such file.{_how_to_make(path)}")


def _how_to_make(path: str) -> str:
    """Return what makes an example's files: the `make.py` of its folder."""
    folders = (folder for folder in Path(path).parents if "examples" in folder.parts)
    script = next((folder / "make.py" for folder in folders if (folder / "make.py").is_file()), None)
    return f" `python {script}` makes it." if script else ""
