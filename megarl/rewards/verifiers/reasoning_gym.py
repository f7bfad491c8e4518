"""`reasoning_gym`: the task's own scorer decides.

ground_truth: {"dataset": name, "entry": {"question", "answer", "metadata", ...}} as reasoning-gym made the
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
from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, RunIn, Score, verifier
from megarl.rewards.extraction import Extract, TagName, Text, answer_part, extract


def _run_in(ground_truth: GroundTruth) -> RunIn:
    """Score tasks that only compare strings inline, and in a worker those that parse or search what a model wrote."""
    generic = gym.dataset.ProceduralDataset.score_answer
    return "inline" if getattr(_scorer_of(ground_truth), "__func__", None) is generic else "worker"


@verifier(run_in=_run_in, timeout_s=10.0)
def reasoning_gym(
    response: Response,
    ground_truth: GroundTruth,
    *,
    extraction: Extract = "auto",
    answer_marker: Text = "Answer:",
    tag: TagName = "answer",
    keep_thinking: bool = False,
    exact_only: bool = False,
) -> Score:
    """Return the score (0 to 1) that the task gives the extracted answer, or to None where there is no answer.

    extraction, answer_marker, tag: where the answer stands, see `extraction.extract`.
    keep_thinking: look for the answer in the thinking block too.
    exact_only: a score below 1 counts as 0. Many tasks give part credit, some of it for containing the answer.
    """
    scorer = _scorer_of(ground_truth)
    entry = ground_truth.get("entry")
    if not isinstance(entry, dict) or "answer" not in entry:
        raise BadGroundTruth("a reasoning_gym ground truth needs 'entry', with 'answer' and 'metadata'")
    text = response.text if keep_thinking else answer_part(response)
    answer = extract(text, extraction, marker=answer_marker, tag=tag)
    value = float(scorer(answer, entry))
    if exact_only and value < 1.0:
        value = 0.0
    return Score(value, reason=None if answer is not None else "no answer found")


def _scorer_of(ground_truth: GroundTruth) -> Callable[[str | None, dict[str, Any]], float]:
    name = ground_truth.get("dataset")
    if not isinstance(name, str):
        raise BadGroundTruth("a reasoning_gym ground truth needs 'dataset', the task's name")
    try:
        return _scorer(name, json.dumps(ground_truth.get("config") or {}, sort_keys=True))
    except (AssertionError, TypeError, ValueError) as error:
        raise BadGroundTruth(f"reasoning_gym's task {name!r} refuses its 'config': {error}") from None


@functools.cache
def _scorer(name: str, config: str) -> Callable[[str | None, dict[str, Any]], float]:
    if name not in DATASETS:
        raise BadGroundTruth(f"reasoning_gym has no task {name!r}.{did_you_mean(name, DATASETS)}")
    return gym.create_dataset(name, **json.loads(config)).score_answer
