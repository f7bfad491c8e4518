"""The `Scorer`: samples in, scored samples out, each as soon as it is ready.

    scorer = Scorer({"verifiers": [{"name": "math"}], "shaping": [{"name": "format", "weight": 0.1}]})
    sample = await scorer.score(sample)      # reward, reward_parts, unscored_reason are set
    scorer.close()

`score` may be awaited for any number of samples at once, from any event loop; nothing waits for a round's end.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.errors import UserError, did_you_mean
from megarl.rewards.contract import GroundTruth, Response, Score, call, unscored
from megarl.rewards.scoring.compose import PartScore, Scored, compose
from megarl.rewards.scoring.pool import WorkerPool
from megarl.rewards.scoring.services import ServiceHost
from megarl.rewards.settings import Part, RewardSettings
from megarl.rewards.verifiers import Verifier, find

if TYPE_CHECKING:
    from megarl.records import Sample


@dataclass(frozen=True)
class _Ready:
    """A part with its verifier found and its options checked."""

    part: Part
    verifier: Verifier
    options: Mapping[str, Any]
    timeout_s: float


class Scorer:
    """Scores samples by `RewardSettings`; owns the worker pool and the services' connections.

    Made in the main process, it raises UserError at once for unknown verifiers and options.
    Use as a context manager, or call `close`; either leaves no process and no thread.
    """

    def __init__(self, settings: RewardSettings | Mapping[str, Any] | None = None) -> None:
        self.settings = RewardSettings.parse(settings)
        self._named = {
            part.name: _ready(part, f"rewards.verifiers.{index}")
            for index, part in enumerate(self.settings.verifiers)
        }
        self._shaping = [_ready(part, f"rewards.shaping.{i}") for i, part in enumerate(self.settings.shaping)]
        verifiers = [ready.verifier for ready in (*self._named.values(), *self._shaping)]
        preload = [verifier.path for verifier in verifiers if verifier.spec.may_use_worker]
        workers, gib = self.settings.workers, self.settings.worker_memory_gib
        memory_bytes = int(gib * 2**30) if gib else None
        self._pool = WorkerPool(workers, preload, memory_bytes=memory_bytes) if workers else None
        self._services = ServiceHost()

    def check(self, verifiers: Iterable[str]) -> None:
        """Refuse, before anything is sampled, prompts that name a verifier nobody knows."""
        for name in verifiers:
            self._for_prompt(name)

    async def score(self, sample: Sample) -> Sample:
        """Return `sample` with reward, reward_parts and unscored_reason set; nothing that a model wrote raises."""
        response = Response(sample.text, len(sample.response_ids), sample.finish_reason, sample.prompt.text)
        scored = await self.score_response(sample.prompt.verifier, response, sample.prompt.ground_truth)
        return dataclasses.replace(
            sample, reward=scored.reward, reward_parts=scored.parts, unscored_reason=scored.reason
        )

    async def score_response(self, verifier: str, response: Response, ground_truth: GroundTruth) -> Scored:
        """Score a bare response by the prompt's verifier and every shaping part."""
        parts = [self._for_prompt(verifier), *self._shaping]
        gates = [ready for ready in parts if ready.part.gate is not None]
        others = [ready for ready in parts if ready.part.gate is None]
        results: list[PartScore] = []
        for ready in gates:  # in order, and before anything dearer
            results.append(PartScore(ready.part, await self._run(ready, response, ground_truth)))
            if results[-1].shuts:
                break
        else:
            scores = await asyncio.gather(*(self._run(ready, response, ground_truth) for ready in others))
            results += [PartScore(ready.part, score) for ready, score in zip(others, scores, strict=True)]
        return compose(results, gate_value=self.settings.gate_value, clip=self.settings.clip)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return () if self._pool is None else self._pool.pids

    def close(self) -> None:
        """End workers and connections. Idempotent."""
        if self._pool is not None:
            self._pool.close()
        self._services.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _for_prompt(self, verifier: str) -> _Ready:
        if verifier not in self._named:
            if any(ready.part.name == verifier for ready in self._shaping):
                raise UserError(
                    f"rewards.shaping has a part named {verifier!r}, which is also the verifier of a prompt: their "
                    f"scores would be logged as one. Give the part another name, and `verifier: {verifier}`."
                )
            try:
                ready = _ready(Part(name=verifier), "a prompt's verifier")
            except UserError as error:
                raise UserError(f"{error}{did_you_mean(verifier, self._named)}") from None
            self._named[verifier] = ready
            if self._pool is not None and ready.verifier.spec.may_use_worker:
                self._pool.preload(ready.verifier.path)
        return self._named[verifier]

    async def _run(self, ready: _Ready, response: Response, ground_truth: GroundTruth) -> Score:
        try:
            run_in = ready.verifier.run_in(ground_truth)
        except Exception as error:
            return unscored(error)
        if run_in == "service":
            make = partial(ready.verifier.function, **ready.options)
            waiting = asyncio.wrap_future(
                self._services.submit(ready.part.name, make, response, ground_truth)
            )
            try:
                return await asyncio.wait_for(waiting, ready.timeout_s)
            except TimeoutError:
                return Score(None, reason=f"timed out after {ready.timeout_s:g} s")
        if run_in == "inline" or self._pool is None:
            return call(ready.verifier.function, response, ground_truth, ready.options)
        path, options = ready.verifier.path, ready.options
        return await asyncio.wrap_future(
            self._pool.submit(path, response, ground_truth, options, ready.timeout_s)
        )


def _ready(part: Part, where: str) -> _Ready:
    found = find(part.verifier_name, where=where)
    options = found.options(part.options, where=where)
    return _Ready(part, found, options, part.timeout_s or found.spec.timeout_s)
