"""The install script's answers to mistakes, and the pins against pyproject.toml. No network."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "install_trainer.sh"


def install(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: install_trainer.sh [cpu|cuda] VENV_DIR [--dev]"),
        (("cpu",), "usage: install_trainer.sh [cpu|cuda] VENV_DIR [--dev]"),
        (("one", "two"), "usage: install_trainer.sh [cpu|cuda] VENV_DIR [--dev]"),
        (("venv", "--fast"), "unknown option --fast"),
        (("/proc/no/such place",), "cannot make the folder /proc/no/such place"),
    ],
)
def test_a_wrong_call_is_answered_before_anything_is_made(arguments: tuple[str, ...], message: str) -> None:
    done = install(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_interpreter_that_does_not_fit_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = install(str(tmp_path / "venv"), PYTHON=str(old))
    assert done.returncode == 2
    assert f"PYTHON={old} is not a Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / "venv" / "bin").exists()


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if "==" in line]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_the_pins_are_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    main, dev = pins("cpu.txt"), pins("dev.txt")
    assert main.keys() & dev.keys() == set(), "a package is pinned once"
    wanted = [(line, main) for line in project["dependencies"]]
    wanted += [(line, main | dev) for line in project["optional-dependencies"]["dev"]]
    for line, pinned in wanted:
        need = Requirement(line)
        version = pinned.get(canonicalize_name(need.name))
        assert version is not None, f"{need.name} is not pinned: run launch/lock.sh"
        assert need.specifier.contains(version, prereleases=True), (
            f"{need} is pinned to {version}: run launch/lock.sh"
        )
