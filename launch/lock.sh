#!/usr/bin/env bash
# Pin what megarl's environment holds: writes requirements/cpu.txt and requirements/dev.txt.
#
#   launch/lock.sh [VENV_DIR]      (default: .venv in the project's folder)
#
# cpu.txt is everything that `dependencies` and `build-system.requires` of pyproject.toml need, directly or not,
# at the versions installed in VENV_DIR; dev.txt is what the `dev` extra needs beyond that. To move to newer
# versions, install them in VENV_DIR, run the tests, then run this.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:-"$root/.venv"}"

"$venv/bin/python" - "$root" <<'PYTHON'
import importlib.metadata as metadata
import platform
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(roots: list[str]) -> dict[str, str]:
    """name -> version of everything the roots need, as installed here."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(Requirement(root), "pyproject.toml") for root in roots]
    while todo:
        need, wanted_by = todo.pop()
        key = (canonicalize_name(need.name), frozenset(need.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found = metadata.distribution(need.name)
        except metadata.PackageNotFoundError:
            sys.exit(f"{wanted_by} needs {need}, which is not installed: install it, then lock again.")
        if not need.specifier.contains(found.version, prereleases=True):
            sys.exit(f"{wanted_by} needs {need}, but {found.version} is installed: mend that, then lock again.")
        versions[key[0]] = found.version.split("+")[0]  # torch 2.13.0+cpu is the CPU build of 2.13.0
        for line in found.requires or ():
            inner = Requirement(line)
            extras = need.extras or {""}
            if not inner.marker or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append((inner, key[0]))
    return versions


def write(path: Path, title: str, versions: dict[str, str]) -> None:
    head = f"# {title}\n# Made by launch/lock.sh with Python {platform.python_version()}. Do not edit.\n"
    path.write_text(head + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
    print(f"{path}: {len(versions)} packages")


root = Path(sys.argv[1])
project = tomllib.loads((root / "pyproject.toml").read_text())
main = closure(project["project"]["dependencies"] + project["build-system"]["requires"])
dev = closure(project["project"]["optional-dependencies"]["dev"])
write(root / "requirements/cpu.txt", "What megarl needs on a CPU, all of it, pinned.", main)
beyond = {name: version for name, version in dev.items() if name not in main}
write(root / "requirements/dev.txt", "What the tests and checks need beyond cpu.txt, pinned.", beyond)
PYTHON
