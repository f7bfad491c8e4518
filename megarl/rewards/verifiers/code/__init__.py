"""`code`: the share of a task's unit tests that the program in a response passes.

The program is the last closed fenced block, thinking apart. It runs in a sandbox (`megarl/rewards/execution`)
that gets the tests' inputs and never what is expected of it: outputs come back as bytes or JSON text and are
compared out here. So there is nothing inside to patch, print, skip or read that would turn a wrong answer
into a right one.

What a program does (crash, hang, eat memory, kill its own sandbox) is a failed test. Only what the sandbox
itself cannot do makes a response unscored: otherwise "unscored" would be a way for the policy to escape a zero.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.errors import UserError, did_you_mean
from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.execution import Kind, Limits, Sandbox, SandboxFailure, SandboxResult, Session, choose
from megarl.rewards.extraction import answer_part, last_code_block
from megarl.rewards.verifiers.code.compare import Comparison, How
from megarl.rewards.verifiers.code.unit_tests import CallTest, StdinTest, Test, read_tests

REASON_CHARACTERS = 200
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Language:
    """How programs of a language are run. labels: names after a fence, lower case. file: the program's file name.

    build: a command run once before the tests, in the work folder; its failure fails them all. run: the command;
    empty for Python, which runs in the sandbox's own interpreter. Programs are found in /usr and /bin.
    """

    labels: tuple[str, ...]
    file: str = "main.py"
    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


PYTHON = Language(("python", "python3", "py"))
LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {
        "python": PYTHON,
        "c": Language(("c",), "main.c", ("gcc", "-O2", "-o", "main", "main.c", "-lm"), ("./main",)),
        "cpp": Language(
            ("cpp", "c++", "cxx", "cc"),
            "main.cpp",
            ("g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
            ("./main",),
        ),
        "javascript": Language(("javascript", "js", "node"), "main.js", (), ("node", "main.js")),
    }
)
NO_LANGUAGES: Mapping[str, Language] = MappingProxyType({})
SANDBOX_OPTIONS = ("python", "read_only", "cgroups", "unsafe_allow_unsandboxed")
LIMITS = Limits()


def check_code(
    *,
    language: str = "python",
    languages: Mapping[str, Language] = NO_LANGUAGES,
    sandbox: Kind = "auto",
    **options: Any,
) -> None:
    """Run a trial program in the sandbox that these options ask for. Raises UserError where there is none."""
    known, language = {**LANGUAGES, **languages}, language.lower()
    if language not in known:
        raise UserError(f"language {language!r} is not known.{did_you_mean(language, known)}")
    for name, one in languages.items():
        if problem := _problem(name, one):
            raise UserError(f"languages: {name!r}: {problem}")
    given = {name: options[name] for name in SANDBOX_OPTIONS if name in options}
    chosen = choose(sandbox, programs=bool(known[language].run), **given)
    log.info("code: programs run in %s", chosen.describe())


def _problem(name: str, language: Language) -> str | None:
    """Return what keeps a language from ever being found or run."""
    if not name or name != name.lower():
        return "its name must be lower case, as those of prompts are read"
    if not language.labels or not all(re.fullmatch(r"[a-z\d_+#-]+", label) for label in language.labels):
        return f"labels {list(language.labels)}: names as they stand after a fence are needed, in lower case"
    if language.file in ("", ".", "..") or "/" in language.file:
        return f"file {language.file!r}: a file's name is needed, without a folder"
    if not language.run and (language.build or language.file != PYTHON.file):
        return "run is missing: without it the program runs in Python, as main.py and without a build"
    if "" in (*language.build[:1], *language.run[:1]):
        return "build and run must begin with the name of a program"
    return None


@verifier(timeout_s=240, check=check_code)
def code(
    response: Response,
    ground_truth: GroundTruth,
    *,
    score: Literal["all", "fraction"] = "all",
    run_all: bool = False,
    max_tests: Annotated[int, Field(ge=1)] | None = None,
    total_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0,
    language: str = "python",
    languages: Mapping[str, Language] = NO_LANGUAGES,
    compare: How = "lines",
    float_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 0.0,
    ignore_case: bool = False,
    limits: Limits = LIMITS,
    sandbox: Kind = "auto",
    python: str | None = None,
    read_only: tuple[str, ...] = (),
    cgroups: bool = True,
    unsafe_allow_unsandboxed: bool = False,
) -> Score:
    """Run the response's program on the ground truth's tests (`unit_tests.py` lists their shapes).

    score: `all` gives 1 for all tests passed and 0 otherwise, `fraction` the share of tests passed.
    run_all: go on after a failed test though `all` knows its verdict; for the `passed` part in the logs.
    max_tests: at most so many, evenly spread over the task's. total_seconds: for all tests together; those
        that were not reached by then count as failed. It is plain time on the clock, on a crowded machine too. Keep
        it well below the verifier's own time bound.
    language: unless the ground truth has a `language`. languages: further ones, or in place of the built-in.
    compare, float_tolerance, ignore_case: see `Comparison`. limits: of one test, see `Limits`.
    sandbox, python, read_only, cgroups, unsafe_allow_unsandboxed: see `execution.choose`.
    """
    known = {**LANGUAGES, **languages}
    name = str(ground_truth.get("language") or language).lower()
    if name not in known:
        raise BadGroundTruth(
            f"language {name!r} is not known.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    spoken = known[name]
    tests = _spread(read_tests(ground_truth), max_tests)
    if spoken.run and any(isinstance(test, CallTest) for test in tests):
        raise BadGroundTruth(f"function-call tests are for Python; this task's language is {name!r}")
    program = last_code_block(answer_part(response), spoken.labels)
    if program is None:
        fault = f"no closed code block labelled {spoken.labels[0]!r} or unlabelled"
        return _score(score, 0, 0, len(tests), fault)
    chosen = choose(
        sandbox,
        python=python,
        programs=bool(spoken.run),
        read_only=tuple(read_only),
        cgroups=cgroups,
        unsafe_allow_unsandboxed=unsafe_allow_unsandboxed,
    )
    comparison = Comparison(compare, float_tolerance, ignore_case)
    judge = _Judge(spoken, tests, comparison, limits, deadline=time.monotonic() + total_seconds)
    try:
        passed, run, reason = judge.judge(chosen, program, stop=score == "all" and not run_all)
    except SandboxFailure as failure:
        return Score(None, reason=f"sandbox: {failure}"[:REASON_CHARACTERS])
    return _score(score, passed, run, len(tests), reason)


@dataclass(frozen=True)
class _Judge:
    """One program's tests, and the rules for them. deadline: on the monotonic clock, for all tests."""

    language: Language
    tests: Sequence[Test]
    comparison: Comparison
    limits: Limits
    deadline: float

    def judge(self, sandbox: Sandbox, program: str, *, stop: bool) -> tuple[int, int, str | None]:
        """Return how many tests passed, how many were run, and what was wrong with the first failed one.

        stop: at the first failed test.
        """
        passed, first, build = 0, None, self.language.build
        files = {self.language.file: program.encode("utf-8", "replace")}
        with sandbox.session(files, self.limits, build=build) as session:
            if build and not (built := session.build(within=self.deadline - time.monotonic())).ok:
                return 0, 0, f"does not build: {_why(built)}"
            for number, test in enumerate(self.tests, start=1):
                left = self.deadline - time.monotonic()
                late = "not reached in the time for all tests"
                fault = self._fault(session, test, left) if left > 0 else late
                passed += fault is None
                if fault is not None:
                    first = first or f"test {number}: {fault}"
                    if stop or left <= 0:
                        return passed, number, first
        return passed, len(self.tests), first

    def _fault(self, session: Session, test: Test, left: float) -> str | None:
        """Return what is wrong with the program on this test; None if it passes."""
        if isinstance(test, CallTest):
            run = session.call(test.function, test.args, test.kwargs, within=left)
        elif self.language.run:
            run = session.command(self.language.run, test.stdin.encode("utf-8", "replace"), within=left)
        else:
            run = session.script(test.stdin.encode("utf-8", "replace"), within=left)
        if not run.ok:
            return _why(run)
        if isinstance(test, StdinTest):
            return self.comparison.difference(test.stdout, run.stdout.decode("utf-8", "replace"))
        if not run.result:
            return "ended before the function returned"
        return self.comparison.value_difference(test.expected, run.result.decode("utf-8", "replace"))


def _why(run: SandboxResult) -> str:
    """Return how a run ended, for people."""
    if run.ended == "exit":
        last = run.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return f"exit code {run.code}" + (f": {last[0]}" if last else "")
    if run.ended == "signal":
        return f"killed by {signal.Signals(run.code).name}"
    return _ENDED[run.ended].format(run=run)


_ENDED = MappingProxyType(
    {
        "cpu_time": "over its processor time ({run.cpu_seconds:.1f} s used)",
        "wall_time": "over its time on the clock ({run.wall_seconds:.1f} s)",
        "memory": "over its memory",
        "processes": "too many processes",
        "disk": "over its space for files",
        "output": "too much output",
        "lost": "brought its sandbox down",
    }
)


def _spread(tests: tuple[Test, ...], most: int | None) -> tuple[Test, ...]:
    """Return at most `most` of them, evenly spread, the first and last among them."""
    if most is None or len(tests) <= most:
        return tests
    step = (len(tests) - 1) / max(1, most - 1)
    return tuple(tests[round(index * step)] for index in range(most))


def _score(kind: str, passed: int, run: int, total: int, reason: str | None) -> Score:
    value = passed / total if kind == "fraction" else float(passed == total)
    what = f"passed {passed} of {total}" + (f" ({run} run)" if run < total else "")
    return Score(
        value,
        parts={"passed": float(passed), "tests": float(total), "passed_fraction": passed / total},
        reason=f"{what}; {reason}"[:REASON_CHARACTERS] if reason else what,
    )
