"""What differs between the versions of megatron-core: the pin is what was tested, what is missing is named."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megarl.errors import UserError
from megarl.megatron import versions

ROOT = Path(__file__).parents[2]


def pinned(file: str) -> Version:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return Version(next(line.partition("==")[2] for line in lines if line.startswith("megatron-core==")))


def test_the_pin_ends_where_the_tests_do() -> None:
    """It reaches from what the scripts install to what launch/test_megatron.sh installs, and no further."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions.SUPPORTED in project["dependencies"]
    supported = Requirement(versions.SUPPORTED).specifier
    oldest, newest = pinned("cpu.txt"), pinned("megatron-newest.txt")
    assert {str(bound) for bound in supported} == {f">={oldest}", f"<={newest}"}
    assert Version(versions.installed()) in supported


@pytest.mark.parametrize(
    ("file", "source", "asked"),
    [
        ("transformer/moe/paged_stash.py", "import torch\n\nimport triton\n", True),
        ("transformer/moe/ops/paged_stash.py", "import triton\nimport triton.language as tl\n", True),
        ("transformer/moe/paged_stash.py", "try:\n    import triton\nexcept ImportError:\n    pass\n", False),
        ("transformer/moe/experts.py", "import torch\n", False),
    ],
)
def test_triton_is_asked_for_where_megatron_core_imports_it(
    file: str, source: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert versions.imports_triton(tmp_path) == asked
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    if asked:
        with pytest.raises(UserError, match=r"imports triton, .*pip install triton"):
            versions.require_triton(tmp_path)
    else:
        versions.require_triton(tmp_path)


def test_a_router_without_the_switch_is_refused_with_what_to_install() -> None:
    with pytest.raises(RuntimeError) as refusal:
        versions.router_switch(object())
    assert "object no longer has calculate_per_token_loss" in str(refusal.value)
    assert f"pip install '{versions.SUPPORTED}'" in str(refusal.value)
