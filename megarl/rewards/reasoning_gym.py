"""`reasoning_gym`: the task's own scorer decides.

reference: {"dataset": name, "entry": {"question", "answer", "metadata", ...}} as reasoning-gym made the
entry, and optionally {"config": {...}} where the scorer reads the task's configuration.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import reasoning_gym as gym
from reasoning_gym.factory import DATASETS

from megarl.errors import did_you_mean
from megarl.rewards.extraction import Extract, answer_part, extract
from megarl.rewards.registry import BadReference, Place, Reference, Response, Score, verifier


def _place(reference: Reference) -> Place:
    """Tasks that only compare strings are scored inline; those that parse or search what the model wrote are
    not.
    """
    generic = gym.dataset.ProceduralDataset.score_answer
    return "inline" if getattr(_scorer_of(reference), "__func__", None) is generic else "worker"


@verifier(place=_place, timeout_s=10.0)
def reasoning_gym(
    response: Response,
    reference: Reference,
    *,
    extraction: Extract = "auto",
    answer_marker: str = "Answer:",
    tag: str = "answer",
    keep_thinking: bool = False,
    exact_only: bool = False,
) -> Score:
    """The score (0 to 1) that the task gives the extracted answer; no answer found: what it gives to None,
    mostly 0.

    extraction, answer_marker, tag: where the answer stands, see `extraction.extract`.
    keep_thinking: look for the answer in the thinking block too.
    exact_only: a score below 1 counts as 0. Many tasks give part credit, some of it for containing the
    answer.
    """
    scorer = _scorer_of(reference)
    entry = reference.get("entry")
    if not isinstance(entry, dict) or "answer" not in entry:
        raise BadReference("a reasoning_gym reference needs 'entry', with 'answer' and 'metadata'")
    text = response.text if keep_thinking else answer_part(response)
    answer = extract(text, extraction, marker=answer_marker, tag=tag)
    value = float(scorer(answer, entry))
    if exact_only and value < 1.0:
        value = 0.0
    return Score(value, reason=None if answer is not None else "no answer found")


def _scorer_of(reference: Reference) -> Callable[[str | None, dict[str, Any]], float]:
    name = reference.get("dataset")
    if not isinstance(name, str):
        raise BadReference("a reasoning_gym reference needs 'dataset', the task's name")
    try:
        return _scorer(name, json.dumps(reference.get("config") or {}, sort_keys=True))
    except (AssertionError, TypeError, ValueError) as error:
        raise BadReference(f"reasoning_gym's task {name!r} refuses its 'config': {error}") from None


@functools.cache
def _scorer(name: str, config: str) -> Callable[[str | None, dict[str, Any]], float]:
    if name not in DATASETS:
        raise BadReference(f"reasoning_gym has no task {name!r}.{did_you_mean(name, DATASETS)}")
    return gym.create_dataset(name, **json.loads(config)).score_answer
