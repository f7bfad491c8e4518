"""The engine contract: token ids in, token ids out, with log-probabilities, weight versions and (asked for) routes.

Every engine (`embedded`, `sglang`, your own: see `registry`) meets it, and one test-suite
(`tests/rollout/test_engine_contract.py`) runs against all of them. An engine belongs to one data-parallel replica;
nothing here knows torch.distributed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megarl.errors import UserError
from megarl.records import FinishReason, RouteTrace, WeightSpan


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 takes the most likely token (log-probabilities are those of temperature 1).

    max_new_tokens counts the EOS token. stop_token_ids end a response and are part of it.
    top_p = 1, top_k = -1, min_p = 0 sample from the whole distribution, which the trainer can reproduce.
    seed: makes an embedded engine's draw reproducible per request; None = the engine's own stream.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """One prompt to be continued. request_id: unique among the requests under way. token_ids: int32 [prompt_tokens]."""

    request_id: str
    token_ids: np.ndarray
    sampling: SamplingParams
    return_routes: bool = False


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """What one request gave. response_ids: int32 [response_tokens]. logprobs: float32 [response_tokens], temperature
    applied. spans cover the response. routes: as in `RouteTrace`, if asked for."""

    request_id: str
    response_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    spans: tuple[WeightSpan, ...]
    routes: RouteTrace | None = None


# Hugging Face names and whole (unsharded) tensors, in checkpoint order.
WeightStream = Iterable[tuple[str, torch.Tensor]]


class EngineError(RuntimeError):
    """The engine failed in a way a retry may mend (connection lost, server restarted)."""


class Engine(Protocol):
    """What a rollout needs of an engine. All calls but `generate` block until done."""

    @property
    def weight_version(self) -> int:
        """Tell the version of the weights that sample now; 0 until the first `update_weights`."""

    def start(self) -> None:
        """Make the engine ready to generate (load weights, start and await servers). Idempotent."""

    def urls(self) -> tuple[str, ...]:
        """Tell where its servers listen, so that other replicas may share them; empty for an engine without servers."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[GenerateResult]:
        """Yield results in order of completion, one for each request, also for aborted ones (with their partial
        tokens).

        Raises UserError for a request no retry can mend (prompt longer than the context, named by request_id),
        EngineError otherwise.
        """

    def update_weights(self, stream: WeightStream, version: int) -> dict[str, str]:
        """Load whole tensors by HF name and set the version. Call between `pause` and `resume`.

        Returns digests of what was sent, under the names and in the layout that `fingerprint` reports (an engine
        that fuses tensors fuses them here too), so that a sync is proved by `update_weights(...) == fingerprint()`.
        """

    def pause(self) -> None:
        """Stop sampling: running requests are kept and wait."""

    def resume(self) -> None:
        """Go on sampling. Safe to call when not paused."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all) now; their results carry finish_reason 'abort'."""

    def flush(self) -> None:
        """Forget cached keys and values, which belong to old weights."""

    def health(self) -> str | None:
        """Return None when well, else one line that says what is wrong."""

    def fingerprint(self) -> dict[str, str]:
        """Return a digest for each tensor the engine holds, computed from the weights it samples with."""

    def close(self) -> None:
        """Release everything; no process is left. Idempotent."""


def check_request(request: GenerateRequest, *, context: int, vocabulary: int, routes: bool) -> None:
    """Raise UserError, naming the request, where the model cannot take it.

    context: most tokens of prompt and response together. vocabulary: its size. routes: whether the model has experts.
    """
    name, ids, sampling = f"request {request.request_id!r}", request.token_ids, request.sampling
    if not len(ids):
        raise UserError(f"{name}: the prompt is empty")
    if sampling.max_new_tokens < 1:
        raise UserError(f"{name}: max_new_tokens is {sampling.max_new_tokens}, must be at least 1")
    if len(ids) + sampling.max_new_tokens > context:
        raise UserError(
            f"{name}: {len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed the model's "
            f"context of {context} tokens: shorten or filter prompts, or lower max_new_tokens"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise UserError(f"{name}: token ids must lie in 0..{vocabulary - 1} (the vocabulary)")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        raise UserError(f"{name}: temperature must be >= 0, top_p in (0, 1], min_p in [0, 1]")
    if request.return_routes and not routes:
        raise UserError(f"{name}: routes were asked of a model without experts")


def iterate(stream: AsyncIterator[GenerateResult]) -> Iterator[GenerateResult]:
    """Yield the results of `Engine.generate` to a caller without an event loop."""

    async def following() -> GenerateResult | None:
        return await anext(stream, None)

    with asyncio.Runner() as runner:
        while (result := runner.run(following())) is not None:
            yield result
