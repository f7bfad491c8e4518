"""What lies beside the weights in a Hugging Face folder: config, tokenizer, templates, generation settings, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.monitor.status import print_status

KINDS = (
    ".json",
    ".jinja",
    ".txt",
    ".model",
    ".tiktoken",
    ".py",
)  # ends of names of tokenizers' files and of code
# Written anew, or about other weights.
LEFT_BEHIND = (".index.json", "metadata.json", "state.json", "manifest.json")
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"  # transformers' folder of named templates


def write_assets(
    target: Path,
    config: Mapping[str, Any],
    *,
    model: Path,
    tokenizer: Path | None = None,
    chat_template: str | None = None,
    stops: Sequence[int] = (),
) -> None:
    """Write the config and copy what `from_pretrained` needs beside weights into the folder `target`.

    model: folder of generation settings and of the code that `auto_map` names. tokenizer: folder of the tokenizer with
    its own code and templates, and of generation settings where the model has none; None = model. chat_template: takes
    the place of all of its templates. stops: token ids that end a response, if known. An entry of `auto_map` whose code
    is nowhere is left out, and a warning says so.
    """
    tokenizer = tokenizer or model
    for path in (*sorted(model.glob("*.py")), *sorted(tokenizer.iterdir()), model / GENERATION):
        if path.is_file() and path.name.endswith(KINDS) and not path.name.endswith(LEFT_BEHIND):
            shutil.copyfile(path, target / path.name)
    for path in sorted(tokenizer.glob(f"{TEMPLATES}/*.jinja")) if chat_template is None else ():
        (target / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, target / TEMPLATES / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if chat_template is not None:
        (target / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    if stops:
        settings = target / GENERATION
        held = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        settings.write_text(
            json.dumps({**held, "eos_token_id": list(stops)}, indent=2) + "\n", encoding="utf-8"
        )
    for path in target.glob("*config.json"):
        _leave_out_missing_code(path)


def _leave_out_missing_code(path: Path) -> None:
    """Write a config anew without the entries of `auto_map` whose code does not lie beside it, if there are some."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return  # as it was
    named = settings.get("auto_map") if isinstance(settings, dict) else None
    if isinstance(named, list):  # an old way to write it
        named = {"AutoTokenizer": named}
    if not isinstance(named, dict):
        return
    missing = {key: value for key, value in named.items() if not _has_code(path.parent, value)}
    if missing:
        settings["auto_map"] = {key: value for key, value in named.items() if key not in missing}
        if not settings["auto_map"]:
            del settings["auto_map"]
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        print_status(
            f"warning: {path.name}: auto_map names code that does not lie beside it "
            f"({', '.join(map(str, missing.values()))}): left out"
        )


def _has_code(folder: Path, named: Any) -> bool:
    """Whether code lies in the folder, or is named in a repository (`owner/name--module.Class`)."""
    names = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    return all("--" in name or (folder / f"{name.split('.')[0]}.py").is_file() for name in names)
