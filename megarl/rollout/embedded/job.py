"""A request under way."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from megarl.records import FinishReason, RouteTrace, WeightSpan
from megarl.rollout.engine import GenerateRequest, GenerateResult, SamplingParams


@dataclass(eq=False)
class Job:
    """A request with what it has so far, whenever it isn't running.

    tokens int64 [prompt + response so far]; logprobs float32 [response]; routes as in `RouteTrace`, [rows
    known, moe_layers, top_k]; spans cover the response so far. outbox: where its result goes.
    """

    request: GenerateRequest
    seed: int
    outbox: deque[GenerateResult]
    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray
    spans: list[WeightSpan] = field(default_factory=list)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def limit(self) -> int:
        """The number of tokens, prompt included, at which it must stop."""
        return self.prompt + self.sampling.max_new_tokens

    @property
    def filtered(self) -> bool:
        return self.sampling.top_p < 1 or self.sampling.top_k > 0 or self.sampling.min_p > 0

    def close_span(self, version: int) -> None:
        """Note that this version sampled the response tokens since the last span."""
        start, end = self.spans[-1].end if self.spans else 0, len(self.logprobs)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        if end > start:
            self.spans.append(WeightSpan(version, start, end))

    def finish(self, reason: FinishReason) -> None:
        """Put the result in the outbox."""
        routes, spans = None, tuple(self.spans)
        if self.request.return_routes:
            rows = np.ascontiguousarray(self.routes[: len(self.tokens) - 1])
            routes = RouteTrace(experts=rows, spans=spans, checksum=zlib.crc32(rows.tobytes()))
        self.outbox.append(
            GenerateResult(
                request_id=self.request.request_id,
                response_ids=self.tokens[self.prompt :].astype(np.int32),
                logprobs=self.logprobs,
                finish_reason=reason,
                spans=spans,
                routes=routes,
            )
        )
