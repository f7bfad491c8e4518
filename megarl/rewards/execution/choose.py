"""Which sandbox this machine can give, found out by running a program in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from megarl.errors import UserError
from megarl.rewards.execution import backends
from megarl.rewards.execution.cgroup import find_parents
from megarl.rewards.execution.inside import confine
from megarl.rewards.execution.limits import Limits, SandboxFailure
from megarl.rewards.execution.session import Sandbox
from megarl.rewards.execution.view import View, make_view

Kind = Literal["auto", "bubblewrap", "landlock", "none"]

TRIAL = b"import os, subprocess, sys\nprint(sum(map(int, sys.stdin)))\n"
log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def choose(
    kind: Kind = "auto",
    *,
    python: str | None = None,
    programs: bool = False,
    read_only: tuple[str, ...] = (),
    cgroups: bool = True,
    unsafe_allow_unsandboxed: bool = False,
) -> Sandbox:
    """Return a sandbox that has just run a trial program here. Remembered: what a machine permits does not change.

    kind: `auto` takes bubblewrap, else Landlock with a warning; a name insists. `none` confines nothing and
        is refused without `unsafe_allow_unsandboxed`; with it, `auto` may come down to `none` too.
    python, programs, read_only: see `make_view`. cgroups: use control groups where this process may make some.
    Raises UserError where nothing works, with the reason for each.
    """
    if kind == "none" and not unsafe_allow_unsandboxed:
        raise UserError(
            "code sandbox: `sandbox: none` runs model-written programs with all your rights. "
            "If this machine may be lost, also set `unsafe_allow_unsandboxed: true`"
        )
    view = make_view(python, programs=programs, read_only=read_only)
    reasons: list[str] = []
    tries: dict[str, Callable[[View], Sandbox]] = {"bubblewrap": _bubblewrap, "landlock": _landlock}
    for name, attempt in tries.items():
        if kind not in ("auto", name):
            continue
        try:
            sandbox = attempt(view)
        except (SandboxFailure, OSError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if reasons:
            log.warning("code sandbox: using the fall-back %s; %s", sandbox.describe(), "; ".join(reasons))
        return _with_cgroups(sandbox) if cgroups else sandbox
    if unsafe_allow_unsandboxed and kind in ("auto", "none"):
        sandbox = Sandbox(backends.Unconfined(), view)
        log.warning(
            "code sandbox: %s; programs run with all your rights. %s", sandbox.describe(), "; ".join(reasons)
        )
        return _tried(sandbox)
    raise UserError(
        "code sandbox: no way to confine programs works on this machine, and running them unconfined needs "
        f"`unsafe_allow_unsandboxed: true`. Tried {'; '.join(reasons)}. See docs/code_sandbox.md"
    )


def _bubblewrap(view: View) -> Sandbox:
    failures = []
    for variant in backends.bubblewrap_variants():
        try:
            return _tried(Sandbox(variant, view))
        except SandboxFailure as error:
            failures.append(str(error))
    raise SandboxFailure("; ".join(dict.fromkeys(failures)))


def _landlock(view: View) -> Sandbox:
    if not confine.landlock_abi():
        raise SandboxFailure(
            "this kernel has no Landlock (Linux 5.13 or newer, with landlock in its list of LSMs)"
        )
    return _tried(Sandbox(backends.Landlock(), view))


def _with_cgroups(sandbox: Sandbox) -> Sandbox:
    parents = find_parents()
    if parents is None:
        return sandbox
    try:
        return _tried(replace(sandbox, cgroups=parents))
    except SandboxFailure as error:
        log.info("code sandbox: no control groups (%s)", error)
        return sandbox


def _tried(sandbox: Sandbox) -> Sandbox:
    """Return the sandbox, if it adds 2 and 3."""
    with sandbox.session({"main.py": TRIAL}, Limits()) as session:
        run = session.script(b"2\n3\n")
    if run.stdout.strip() != b"5":
        raise SandboxFailure(
            f"{sandbox.describe()} started, but a trial program did not run in it "
            f"({run.ended} {run.code}: {run.stderr.decode('utf-8', 'replace').strip()[-300:]})"
        )
    return sandbox
