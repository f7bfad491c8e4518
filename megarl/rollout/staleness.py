"""How old the weights are that sampled a response, and what becomes of responses that are too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megarl.records import Group, Sample

StaleResponses = Literal["stop", "drop", "correct"]


class WrongWeights(RuntimeError):
    """A token was sampled by other weights than the trainer believes the engine to have had."""


@dataclass(frozen=True)
class Staleness:
    """ages: int64 [responses], weight versions that each response's oldest token is behind. stale: responses that are
    older than allowed."""

    ages: np.ndarray
    stale: int

    def counts(self) -> dict[str, tuple[float, float]]:
        """As `rollout_counts` gives them."""
        return {
            "staleness_mean": (float(self.ages.sum()), float(len(self.ages))),
            "stale_responses": (float(self.stale), 1.0),
        }


def settle_staleness(
    groups: Sequence[Group], *, version: int, most: int, then: StaleResponses
) -> tuple[list[Group], Staleness]:
    """The groups without the responses that are more than `most` versions behind (`drop`), or with them, for the
    algorithm's correction (`correct`). version: of the weights that the engine holds and that are trained now.

    Raises WrongWeights naming the sample: always for a version from the future, with `stop` for a stale one.
    """
    bound = most if then == "stop" else version
    aged = [[(s, _age(s, version, bound)) for s in g.samples] for g in groups]
    if then == "drop":
        kept = [tuple(s for s, age in samples if age <= most) for samples in aged]
        groups = [replace(g, samples=samples) for g, samples in zip(groups, kept, strict=True)]
    ages = np.array([age for samples in aged for _, age in samples], dtype=np.int64)
    return list(groups), Staleness(ages, int((ages > most).sum()))


def _age(sample: Sample, version: int, most: int) -> int:
    """Versions that the oldest token is behind."""
    for span in sample.spans:
        if not 0 <= version - span.version <= most:
            raise WrongWeights(
                f"sample {sample.sample_id!r}: its tokens {span.start} to {span.end} were sampled by weight "
                f"version {span.version}, the engine was given version {version}"
            )
    return max((version - span.version for span in sample.spans), default=0)
