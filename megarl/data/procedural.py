"""Questions of `reasoning-gym`: any of its tasks, endless or exactly one of its datasets.

A trap this file avoids: most tasks draw item `i` from `Random(seed + i)`, so the datasets of seed 0 and
seed 1 are the same questions moved by one, and "another seed for the test set" tests on the training set.
An endless source therefore derives unrelated seeds by hashing, and held-out questions are told by their
text, never by a seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from numpy.random import MT19937, mtrand

from megarl.data.questions import Question, frame
from megarl.data.settings import ReasoningGymSettings, source_name
from megarl.errors import UserError, did_you_mean

VERIFIER = "reasoning_gym"
CHUNK = 1000  # slots that share one dataset object of an endless source
SPARES = 8  # candidates each slot has in that dataset


class ReasoningGymQuestions:
    """The questions of one task.

    Iterated, those of a finite source: the items of `create_dataset(task, seed=seed, size=size)`.
    `candidate(slot, attempt)`: of an endless source; slots are independent, so a replica makes only its own.
    Raises UserError for an unknown task and for parameters the task refuses.
    """

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self.settings = settings
        self.name = source_name(settings)
        self.size = settings.size
        self._scratch = MT19937(0)
        self._dataset = lru_cache(maxsize=16)(self._make)
        parts = settings.params.get("datasets") if settings.task == "composite" else None
        self._configs: dict[Any, Any] = {settings.task: dict(settings.params)}
        if isinstance(parts, list):
            self._configs = {p.get("name"): p.get("config", {}) for p in parts if isinstance(p, dict)}
        self._dataset(
            settings.seed, settings.size or CHUNK
        )  # refuse wrong settings now, not at the first draw

    def __iter__(self) -> Iterator[Question]:
        """All questions of a finite source."""
        assert self.size is not None
        dataset = self._dataset(self.settings.seed, self.size)
        return (self._question(dataset, i, f"{self.name}/{i}") for i in range(self.size))

    def candidate(self, slot: int, attempt: int) -> Question:
        chunk, row = divmod(slot, CHUNK)
        again, spare = divmod(attempt, SPARES)
        dataset = self._dataset(_derived_seed(self.settings.seed, chunk, again), CHUNK * SPARES)
        question_id = f"{self.name}/{slot}" + (f".{attempt}" if attempt else "")
        return self._question(dataset, spare * CHUNK + row, question_id)

    def _question(self, dataset: Any, index: int, question_id: str) -> Question:
        kept = mtrand.get_bit_generator()  # pool_matrix reseeds numpy's global generator
        mtrand.set_bit_generator(self._scratch)  # 200 times as fast as saving and restoring its state
        try:
            entry = dataset[index]
        finally:
            mtrand.set_bit_generator(kept)
        task = entry["metadata"].get("source_dataset", self.settings.task)
        config = self._configs.get(task)  # some scorers read it: decimal places, for example
        return Question(
            question_id=question_id,
            messages=frame([{"role": "user", "content": entry["question"]}], self.settings),
            content=entry["question"],
            verifier=VERIFIER,
            ground_truth={"dataset": task, "entry": entry, **({"config": config} if config else {})},
        )

    def _make(self, seed: int, size: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        task, params = self.settings.task, dict(self.settings.params)
        if task not in DATASETS:
            raise UserError(f"reasoning-gym has no task {task!r}.{did_you_mean(task, DATASETS)}")
        known = {f.name for f in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
        for key in params:
            if key in ("seed", "size"):
                raise UserError(f"source {self.name!r}: set `{key}` beside `params`, not inside it.")
            if key not in known:
                raise UserError(
                    f"source {self.name!r}: task {task!r} has no parameter {key!r}."
                    f"{did_you_mean(key, known)} It has: {', '.join(sorted(known))}."
                )
        try:
            if task == "composite":
                params["datasets"] = _composite_parts(params.get("datasets"))
            return reasoning_gym.create_dataset(task, **params, seed=seed, size=size)
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"source {self.name!r}: task {task!r} refuses its parameters: {error}") from error


def _composite_parts(parts: Any) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec

    if not isinstance(parts, list) or not parts:
        raise ValueError("a composite needs `datasets`: a list of {name, weight, config}")
    return [
        DatasetSpec(name=p["name"], weight=p.get("weight", 1.0), config=p.get("config", {})) for p in parts
    ]


def _derived_seed(seed: int, chunk: int, again: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{chunk}/{again}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31
