"""A model family of a user's own: one declaration outside the package, found by its entry point."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.weights.families import family_of
from megarl.weights.families.qwen import QWEN3

MINE = replace(QWEN3, name="mine", architectures=("MyMoeForCausalLM",))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` of a package with this entry point leaves."""
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[megarl.families]\nmine = {__name__}:MINE\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("installed")
def test_a_family_is_a_few_lines_outside_the_package() -> None:
    assert family_of({"architectures": ["MyMoeForCausalLM"]}) is MINE
    assert family_of({"architectures": ["Qwen3MoeForCausalLM"]}) is QWEN3


def test_without_the_package_its_architecture_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="architecture MyMoeForCausalLM is not supported"):
        family_of({"architectures": ["MyMoeForCausalLM"]})


@pytest.mark.usefixtures("installed")
def test_an_unknown_architecture_is_told_with_the_users_own_among_the_known() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'MyMoeForCausalLM'.*Supported: .*MyMoeForCausalLM"):
        family_of({"architectures": ["MyMoForCausalLM"]})
