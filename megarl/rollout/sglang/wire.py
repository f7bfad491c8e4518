"""What goes to SGLang's `/generate` and what comes back: pure functions of one request and its answer."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.megatron.architecture import Architecture
from megarl.records import FinishReason, RouteTrace, WeightSpan
from megarl.rollout.engine import EngineError, GenerateRequest, GenerateResult
from megarl.rollout.sglang.settings import PauseMode


class UnknownWeights(EngineError):
    """A server sampled by weights that megarl did not load: it was started again and has not got them yet."""


def encode_request(request: GenerateRequest, rid: str) -> dict[str, Any]:
    """Make the body of `POST /generate`. Everything is said, so that no default of the checkpoint's applies."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_routed_experts": request.return_routes,
        "routed_experts_start_len": 0,
    }


def decode_result(
    request: GenerateRequest,
    answer: Mapping[str, Any],
    architecture: Architecture,
    pause_mode: PauseMode = "retract",
) -> GenerateResult:
    """Read the answer of `/generate`. Raises EngineError, naming the request, for one that contradicts itself."""
    meta = answer["meta_info"]
    name = f"request {request.request_id!r}"
    finish = finish_reason(meta["finish_reason"], name)
    ids = np.asarray(answer["output_ids"], dtype=np.int32)
    pairs = meta.get("output_token_logprobs") or []
    if finish == "abort" and (
        len(pairs) != len(ids) or (request.return_routes and "routed_experts" not in meta)
    ):
        # Aborted while it waited in the queue: SGLang then has no routes, and ids and log-probabilities of
        # different moments. Nothing of it is used.
        return nothing_sampled(request)
    if [pair[1] for pair in pairs] != ids.tolist():
        raise EngineError(
            f"{name}: SGLang returned {len(ids)} tokens and log-probabilities of {len(pairs)} others"
        )
    spans = decode_spans(meta, len(ids), name)
    trace = None
    if request.return_routes:
        trace = decode_routes(request, meta, architecture, len(ids), spans, pause_mode)
    logprobs = np.asarray([pair[0] for pair in pairs], dtype=np.float32)
    return GenerateResult(request.request_id, ids, logprobs, finish, spans, trace)


def nothing_sampled(request: GenerateRequest) -> GenerateResult:
    """Make the result of a request that was aborted before it had a token."""
    none = np.zeros(0, dtype=np.int32)
    return GenerateResult(request.request_id, none, none.astype(np.float32), "abort", ())


def finish_reason(reason: Mapping[str, Any] | None, name: str) -> FinishReason:
    """Return `stop`, `length` or `abort`. An abort with an error code is SGLang's way to report a failure."""
    kind = reason and reason.get("type")
    if kind == "abort" and reason and reason.get("status_code"):
        raise EngineError(f"{name}: SGLang gave up: {reason.get('message')}")
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"{name}: SGLang ended it for an unknown reason: {reason}")
    return kind


def decode_spans(meta: Mapping[str, Any], tokens: int, name: str) -> tuple[WeightSpan, ...]:
    """Read contiguous spans of weight versions that cover `tokens` response tokens.

    Raises UnknownWeights for a version that is not one of megarl's numbers.
    """
    if tokens == 0:
        return ()
    raw: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or [
        {"version": meta.get("weight_version"), "start": 0, "end": tokens}
    ]
    spans = []
    for span in raw:
        if not str(span["version"]).isdigit():
            raise UnknownWeights(
                f"{name}: it was sampled by weights of version {span['version']!r}, which megarl did not load"
            )
        if span["end"] > span["start"]:
            spans.append(WeightSpan(int(span["version"]), int(span["start"]), int(span["end"])))
    return tuple(spans)


def decode_routes(
    request: GenerateRequest,
    meta: Mapping[str, Any],
    architecture: Architecture,
    tokens: int,
    spans: tuple[WeightSpan, ...],
    pause_mode: PauseMode,
) -> RouteTrace:
    """Read the route trace, [prompt + response - 1, moe_layers, top_k]. The server sends rows of dense layers, too.

    A request that was retracted (by a pause in mode `retract`, or for lack of memory) ran all its tokens again when it
    went on. Its rows then all come from the last weights, which the trace says in its spans.
    """
    name = f"request {request.request_id!r}"
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise EngineError(
            f"{name}: the server sent no routes; it must be started with --enable-return-routed-experts"
        )
    flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    shape = (len(request.token_ids) + tokens - 1, architecture.transformer["num_layers"], architecture.top_k)
    if flat.size != math.prod(shape):
        raise EngineError(f"{name}: {flat.size} routed experts are not [tokens - 1, layers, top_k] = {shape}")
    experts = flat.reshape(shape)[:, architecture.moe_layers]
    if experts.size and (experts.min() < 0 or experts.max() >= architecture.num_experts):
        raise EngineError(
            f"{name}: routed experts {experts.min()}..{experts.max()}, the model has {architecture.num_experts}"
        )
    made_by = spans
    if meta.get("num_retractions") and len(spans) > 1:
        if pause_mode == "in_place":
            raise EngineError(
                f"{name}: it ran again between two weight versions, its routes' version is unknown"
            )
        made_by = (WeightSpan(spans[-1].version, 0, tokens),)
    compact = np.ascontiguousarray(experts, dtype=np.min_scalar_type(architecture.num_experts - 1))
    return RouteTrace(compact, made_by, zlib.crc32(compact.tobytes()))
