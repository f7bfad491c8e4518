"""The contract of a verifier: what it is given, what it returns, and how it declares where it runs.

A verifier is a plain function that reads one response and its ground truth, and returns a score.

    @verifier(run_in="inline")
    def shouts(response: Response, ground_truth: GroundTruth, *, at_least: int = 1) -> float:
        return float(response.text.count("!") >= at_least)

Its keyword-only parameters are its options: they are checked against their annotations when a configuration
is read, so a misspelt option is an error before the first token is sampled. A file of `verifiers/` is found by
its name; users add a verifier by import path (`my_rewards.shouting:shouts`), with or without the decorator.

Where a verifier runs is part of its declaration:
- `inline`: in the caller's thread. For functions that cannot hang and cost well under a millisecond.
- `worker`: in a process of the pool, killed and replaced when it outlives its time bound. The default.
- `service`: a class, made once with the options, whose `async def __call__(response, ground_truth)` waits for
  somebody else's computer; `async def aclose()` ends it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from megarl.errors import UserError

GroundTruth = Mapping[str, Any]
RunIn = Literal["inline", "worker", "service"]

F = TypeVar("F", bound=Callable[..., Any])


BAD_GROUND_TRUTH = "bad ground truth"  # how the reason of a `BadGroundTruth` begins


@dataclass(frozen=True)
class Response:
    """Everything that a verifier may know of a sample; small and picklable.

    text: the decoded response, with special tokens but for those that frame it (see `ChatTokenizer.decode`).
    tokens: response tokens, None where unknown (a file of texts).
    finish_reason: "stop", "length" or "abort".
    prompt: the rendered prompt, "" where unknown.
    """

    text: str
    tokens: int | None = None
    finish_reason: str = "stop"
    prompt: str = ""


@dataclass(frozen=True)
class Score:
    """A verifier's verdict.

    value: the score, or None = could not be scored, which is never the same as 0.
    parts: the verifier's own sub-scores, logged as `<verifier>/<part>`: finite numbers, or None.
    reason: why value is None, or (for people) why it is what it is.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError("a Score without a value needs a reason")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a score must be finite, not {self.value!r}; use Score(None, reason=...)")
        for name, part in self.parts.items():
            if part is not None and not (isinstance(part, numbers.Real) and math.isfinite(part)):
                raise ValueError(
                    f"part {name!r} of a score must be a finite number or None, not {part!r:.60}"
                )


class BadGroundTruth(UserError):
    """The ground truth lacks what its verifier needs: a fault of the data's row, not of the response."""


@dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """A verifier's declaration, written above it as `@verifier(...)`; the function stays a plain function.

    run_in: `inline`, `worker` or `service`, or a function of the ground truth that says which
        (`reasoning_gym` knows tasks of two of them).
    timeout_s: the time bound of one response in seconds, unless a configuration sets another.
    check: called with the given options when a configuration is read, before anything is sampled; it raises
        UserError for what cannot work (contradictory options, a missing sandbox).
    warm: called once in the process that workers are forked from, so that every worker has the caches it fills.
    """

    run_in: RunIn | Callable[[GroundTruth], RunIn] = "worker"
    timeout_s: float = 10.0
    check: Callable[..., None] | None = None
    warm: Callable[[], None] | None = None

    @property
    def may_use_worker(self) -> bool:
        """Return whether some response may be scored in a process of the pool."""
        return self.run_in not in ("inline", "service")

    def __call__(self, function: F) -> F:
        function.spec = self  # type: ignore[attr-defined]
        return function


verifier = VerifierSpec


def to_score(returned: Any) -> Score:
    """Turn what a verifier returned into a `Score`: numbers and booleans become values, anything odd is unscored."""
    if isinstance(returned, Score):
        return returned
    if not hasattr(returned, "__float__"):
        return Score(None, reason=f"returned {type(returned).__name__}, expected a number or a Score")
    try:
        value = float(returned)
    except (OverflowError, TypeError, ValueError) as error:
        return Score(None, reason=f"returned no number: {error}")
    return Score(value) if math.isfinite(value) else Score(None, reason=f"returned {value}")


def call(
    function: Callable[..., Any], response: Response, ground_truth: GroundTruth, options: Mapping[str, Any]
) -> Score:
    """Run a verifier in this thread; whatever it raises makes the response unscored, with the reason."""
    try:
        return to_score(function(response, ground_truth, **options))
    except (Exception, SystemExit) as error:
        return unscored(error)


def unscored(error: BaseException) -> Score:
    """Turn what a verifier raised into a `Score` without a value."""
    if isinstance(error, BadGroundTruth):
        return Score(None, reason=f"{BAD_GROUND_TRUTH}: {error}")
    return Score(None, reason=f"raised {type(error).__name__}: {str(error)[:200]}")
