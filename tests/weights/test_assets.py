"""What an exported folder holds beside its weights, by loading it with transformers as its source is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megarl.weights.checkpoint_files import read_config, write_checkpoint

CHAT = [{"role": "user", "content": "a\u2009b"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
DEFAULT, TOOL_USE, RAG = (
    "{{ messages[0].content }}",
    "{{ tools | tojson }}{{ messages[0].content }}",
    "{{ documents | tojson }}",
)
CONFIGURATION = """
from transformers import PretrainedConfig
from .settings_of_tiny import SIZE

class TinyConfig(PretrainedConfig):
    model_type = "tiny-of-tests"

    def __init__(self, size=SIZE, **others):
        super().__init__(**others)
        self.size = size
"""


def as_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    for name, text in (("tool_use", TOOL_USE), ("rag", RAG)):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)


def as_list(folder: Path) -> None:
    named = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": RAG}
    change(folder, chat_template=[{"name": name, "template": text} for name, text in named.items()])


def change(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> None:
    path = folder / name
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, **values}))


@pytest.fixture
def source(quickstart: Path, tmp_path: Path) -> Path:
    """A model's folder with what a folder may hold: code, named templates, tokens, settings."""
    folder = tmp_path / "source"
    folder.mkdir()
    for path in (quickstart.parent / "model").glob("*.json*"):
        shutil.copyfile(path, folder / path.name)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "configuration_tiny.py").write_text(CONFIGURATION)
    (folder / "settings_of_tiny.py").write_text("SIZE = 7\n")
    (folder / "model.safetensors.index.json").write_text("{}")
    change(folder, "generation_config.json", temperature=0.25, do_sample=True)
    change(folder, "preprocessor_config.json", size=3)
    change(
        folder,
        "config.json",
        model_type="tiny-of-tests",
        auto_map={"AutoConfig": "configuration_tiny.TinyConfig"},
    )
    return folder


def written(folder: Path, target: Path, **given: Any) -> Path:
    tensors = [("w", torch.zeros(2))]
    write_checkpoint(
        target, tensors, config=read_config(folder), **{"assets": folder, **given}, dtype=torch.float32
    )
    return target


def renderings(folder: Path) -> list[str]:
    """What a folder's tokenizer makes of a chat: by itself, with tools, by a template's name; and of special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(**given: Any) -> str:
        return str(tokenizer.apply_chat_template(CHAT, tokenize=False, **given))

    found = [render(), render(tools=TOOLS), str(tokenizer.encode("<|im_start|>a<|im_end|>"))]
    if isinstance(tokenizer.chat_template, dict):
        found.append(render(chat_template="rag", documents=[{"title": "t", "text": "x"}]))
    return [*found, str(tokenizer.special_tokens_map)]


@pytest.mark.parametrize("write", [as_files, as_list])
def test_an_exported_tokenizer_renders_as_its_source_by_every_template(source, tmp_path, write):
    write(source)
    expected = renderings(source)
    assert expected[0] != expected[1]
    assert len(expected) == 5
    assert renderings(written(source, tmp_path / "target")) == expected


def test_a_template_of_the_run_takes_the_place_of_all_of_them(source, tmp_path):
    as_files(source)
    target = written(source, tmp_path / "target", chat_template="<{{ messages[0].content }}>")
    assert renderings(target)[:2] == ["<a\u2009b>"] * 2


def test_code_comes_along_and_generation_settings_too(source, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    target = written(source, tmp_path / "target")
    config = AutoConfig.from_pretrained(target, trust_remote_code=True)
    assert (type(config).__name__, config.size) == ("TinyConfig", 7)
    assert GenerationConfig.from_pretrained(target).temperature == 0.25
    assert (target / "preprocessor_config.json").is_file()
    assert not (target / "model.safetensors.index.json").exists()
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_tokenizer_from_elsewhere_brings_its_files_and_the_model_its_code(source, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(source, elsewhere)
    (source / "special_tokens_map.json").write_text('{"cls_token": "<pad>"}')
    for name in ("generation_config.json", "configuration_tiny.py"):
        (elsewhere / name).unlink()
    (elsewhere / "chat_template.jinja").write_text(TOOL_USE)
    target = written(source, tmp_path / "target", assets=elsewhere, model=source)
    assert renderings(target) == renderings(elsewhere)
    assert "cls_token" not in renderings(target)[-1]
    assert (target / "configuration_tiny.py").is_file()
    assert GenerationConfig.from_pretrained(target).temperature == 0.25


def test_an_exported_folder_ends_a_response_where_the_run_did(source, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(source, elsewhere)
    change(elsewhere, "generation_config.json", eos_token_id=1, temperature=0.75)
    change(source, "generation_config.json", eos_token_id=[2, 3])
    target = written(source, tmp_path / "target", assets=elsewhere, model=source, stops=(1, 2, 3))
    held = GenerationConfig.from_pretrained(target)
    assert held.eos_token_id == [1, 2, 3]
    assert held.temperature == 0.25, "the model's own settings, not those beside the tokenizer"


def test_code_that_is_nowhere_is_left_out_of_auto_map_with_a_warning(source, tmp_path, capsys):
    (source / "configuration_tiny.py").unlink()
    auto_map = {"AutoTokenizer": ["tokenization_tiny.Slow", None], "AutoConfig": "owner/name--x.Config"}
    change(source, auto_map=auto_map)
    target = written(source, tmp_path / "target")
    assert "auto_map" not in json.loads((target / "config.json").read_text())
    held = json.loads((target / "tokenizer_config.json").read_text())["auto_map"]
    assert held == {"AutoConfig": "owner/name--x.Config"}
    told = capsys.readouterr().err
    assert (
        "config.json: auto_map names code that does not lie beside it (configuration_tiny.TinyConfig)" in told
    )
    assert "tokenizer_config.json: auto_map names" in told
