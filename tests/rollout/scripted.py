"""A scripted engine: it meets the whole engine contract, and what it answers is known without a model.

In place of a network it has hashes: the next token's distribution and a token's experts are drawn from the digests of
its weights and the tokens so far. So other weights answer otherwise, equal seeds answer alike, and `ScriptedModel`
tells both the engine and the test what is right. A test may also choose the responses, and what goes wrong.

It is a user's own engine: `engine: {kind: tests.rollout.scripted:ScriptedSettings, fails: [no_routes]}`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file

from megarl.errors import UserError
from megarl.megatron.architecture import Architecture
from megarl.records import FinishReason, RouteTrace, Sample, WeightSpan
from megarl.rollout.declaration import EngineContext, EngineSettings
from megarl.rollout.engine import EngineError, GenerateRequest, GenerateResult, WeightStream, check_request
from megarl.weights.checkpoint_files import read_config
from megarl.weights.families import family_of
from megarl.weights.fingerprint import digest

Failure = Literal[
    "no_start",  # `start` is refused
    "engine_error",  # `generate` breaks off after its first result
    "old_version",  # responses say that older weights sampled them
    "no_routes",  # routes that were asked for are left out
    "flipped_bit",  # a bit of the first tensor that is sent is lost on its way
]


class ScriptedSettings(EngineSettings):
    """An engine with known answers, for tests."""

    kind: str = Field(default="tests.rollout.scripted:ScriptedSettings", description="This class.")
    fails: tuple[Failure, ...] = Field(default=(), description="What goes wrong.")

    def make(self, context: EngineContext, urls: Sequence[str] = ()) -> ScriptedEngine:
        return ScriptedEngine(context, self.fails)


class SharedSettings(ScriptedSettings):
    """The same with a server that all replicas share, at an address that is made up."""

    shared: ClassVar[bool] = True

    kind: str = Field(default="tests.rollout.scripted:SharedSettings", description="This class.")

    def make(self, context: EngineContext, urls: Sequence[str] = ()) -> ScriptedEngine:
        return ScriptedEngine(context, self.fails, addresses=tuple(urls) or ("http://first:1",))


class ScriptedModel:
    """What weights answer. weights: by Hugging Face name."""

    def __init__(self, weights: Mapping[str, torch.Tensor], architecture: Architecture) -> None:
        self.weights = weights
        self.key = zlib.crc32("".join(digest(tensor) for _, tensor in sorted(weights.items())).encode())
        self.architecture = architecture

    def logprobs_of_next(self, tokens: np.ndarray, temperature: float) -> np.ndarray:
        """float64 [vocabulary], after these tokens."""
        logits = 2 * self._random(tokens, 0).standard_normal(self.architecture.vocab_size)
        scaled = logits / (temperature or 1.0)
        return scaled - np.logaddexp.reduce(scaled)

    def experts(self, tokens: np.ndarray) -> np.ndarray:
        """[moe_layers, top_k], of the last of these tokens."""
        shape = len(self.architecture.moe_layers), self.architecture.num_experts
        return self._random(tokens, 1).random(shape).argsort(-1)[:, : self.architecture.top_k]

    def _random(self, tokens: np.ndarray, what: int) -> np.random.Generator:
        return np.random.default_rng([self.key, what, zlib.crc32(tokens.astype(np.int32).tobytes())])

    # -- what `tests.rollout.reference.Reference` says of a real model --

    def logprobs(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        pairs = zip(_prefixes(request, result), result.response_ids, strict=True)
        temperature = request.sampling.temperature
        return np.array([self.logprobs_of_next(prefix, temperature)[token] for prefix, token in pairs])

    def greedy(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        return np.array([self.logprobs_of_next(p, 0.0).argmax() for p in _prefixes(request, result)])

    def routes(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        whole = np.concatenate([request.token_ids, result.response_ids])
        return np.sort(np.stack([self.experts(whole[:n]) for n in range(1, len(whole))]), -1)


def _prefixes(request: GenerateRequest, result: GenerateResult) -> Iterator[np.ndarray]:
    for n in range(len(result.response_ids)):
        yield np.concatenate([request.token_ids, result.response_ids[:n]])


@dataclass(eq=False)
class Flight:
    """A request under way. versions: of each response token. rows: experts of each token but the last."""

    request: GenerateRequest
    random: np.random.Generator
    script: Sequence[int] | None
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    finish: FinishReason | None = None

    def step(self, model: ScriptedModel, version: int) -> None:
        """Draw one more token."""
        sampling, n = self.request.sampling, len(self.logprobs)
        tokens = np.array(self.tokens)
        if self.request.return_routes:
            self.rows += [model.experts(tokens[: k + 1]) for k in range(len(self.rows), len(tokens))]
        logprobs = model.logprobs_of_next(tokens, sampling.temperature)
        if self.script is not None:
            token = int(self.script[n])
        elif sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(self.random.choice(len(logprobs), p=np.exp(logprobs)))
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        self.versions.append(version)
        if token in sampling.stop_token_ids:
            self.finish = "stop"
        elif n + 1 == sampling.max_new_tokens or (self.script is not None and n + 1 == len(self.script)):
            self.finish = "length"

    def result(self, fails: Sequence[Failure], expert_type: np.dtype) -> GenerateResult:
        spans: list[WeightSpan] = []
        for n, version in enumerate(v - ("old_version" in fails) for v in self.versions):
            start = spans.pop().start if spans and spans[-1].version == version else n
            spans.append(WeightSpan(version, start, n + 1))
        routes = None
        if self.rows and "no_routes" not in fails:
            experts = np.stack(self.rows).astype(expert_type)
            routes = RouteTrace(experts, tuple(spans), zlib.crc32(experts.tobytes()))
        return GenerateResult(
            self.request.request_id,
            np.array(self.tokens[len(self.request.token_ids) :], np.int32),
            np.array(self.logprobs, np.float32),
            self.finish or "abort",
            tuple(spans),
            routes,
        )


class ScriptedEngine:
    """script: a request's response, cut at its limit and at stop tokens; None = drawn by the request's seed.

    addresses: what it says of its servers. calls: the names of the control calls, in order.
    """

    def __init__(
        self,
        context: EngineContext,
        fails: Sequence[Failure] = (),
        script: Callable[[GenerateRequest], Sequence[int]] | None = None,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self.context, self.fails, self.script, self.addresses = context, fails, script, addresses
        self.calls: list[str] = []
        self._model: ScriptedModel | None = None
        self._flights: dict[str, Flight] = {}
        self._version = 0
        self._paused = False

    @property
    def weight_version(self) -> int:
        return self._version

    def start(self) -> None:
        if "no_start" in self.fails:
            raise UserError("the scripted engine does not start")
        if self._model is None:
            self._model = self._holding(read_weights(self.context.model_path))
            self._version, self._paused = 0, False

    def urls(self) -> tuple[str, ...]:
        return self.addresses

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[GenerateResult]:
        self._started()
        architecture, fails = self.context.architecture, self.fails
        context, vocabulary = architecture.max_positions, architecture.vocab_size
        flights: dict[str, Flight] = {}
        for request in requests:
            routes = bool(architecture.moe_layers)
            check_request(request, context=context, vocabulary=vocabulary, routes=routes)
            if request.request_id in flights.keys() | self._flights.keys():
                raise UserError(f"request {request.request_id!r}: another request with this id is under way")
            random = np.random.default_rng(request.sampling.seed)
            script = self.script(request) if self.script else None
            flights[request.request_id] = Flight(request, random, script, request.token_ids.tolist())
        self._flights |= flights
        left = dict(flights)
        try:
            while left:
                await asyncio.sleep(0)
                model = self._started()
                for name, flight in list(left.items()):
                    if flight.finish is None and not self._paused:
                        flight.step(model, self._version)
                    if flight.finish is not None:
                        if len(left) < len(flights) and "engine_error" in fails:
                            raise EngineError("the scripted engine breaks off")
                        del left[name], self._flights[name]
                        yield flight.result(fails, np.min_scalar_type(max(architecture.num_experts - 1, 0)))
        finally:
            for name in left:
                self._flights.pop(name, None)

    def update_weights(self, stream: WeightStream, version: int) -> dict[str, str]:
        self.calls.append("update_weights")
        sent = {name: tensor.detach().cpu().clone() for name, tensor in stream}
        digests = {name: digest(tensor) for name, tensor in sent.items()}
        if "flipped_bit" in self.fails:
            first = next(iter(sent.values()))
            first.view(-1).view(torch.uint8)[0] ^= 1
        self._model, self._version = self._holding(sent), version
        return digests

    def pause(self) -> None:
        self.calls.append("pause")
        self._paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self._paused = False

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for name in list(self._flights) if request_ids is None else request_ids:
            if name in self._flights:
                self._flights[name].finish = "abort"

    def flush(self) -> None:
        self.calls.append("flush")

    def health(self) -> str | None:
        return "not started" if self._model is None else None

    def fingerprint(self) -> dict[str, str]:
        self.calls.append("fingerprint")
        return {name: digest(tensor) for name, tensor in self._started().weights.items()}

    def close(self) -> None:
        self._model = None

    def _holding(self, weights: dict[str, torch.Tensor]) -> ScriptedModel:
        return ScriptedModel(weights, self.context.architecture)

    def _started(self) -> ScriptedModel:
        if self._model is None:
            raise EngineError("the scripted engine is not started")
        return self._model


def context_of(model: Path, work: Path, **changes: Any) -> EngineContext:
    """What a run would make its engine for, on a CPU in float32. changes: of the context's fields; `max_positions` of
    the model's."""
    config = read_config(model)
    architecture = family_of(config).architecture(config)
    if "max_positions" in changes:
        architecture = replace(architecture, max_positions=changes.pop("max_positions"))
    return EngineContext(model, architecture, work, changes.pop("dtype", torch.float32), **changes)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors; none where the folder has no weights."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


TINY = Architecture({"num_moe_experts": 300, "moe_router_topk": 2}, 50, 64, moe_layers=(1, 2))
CONTEXT = EngineContext(Path("/nowhere"), TINY, Path("/nowhere"), None)  # type: ignore[arg-type]


def scripted(*fails: str, script: Any = None) -> ScriptedEngine:
    """An engine without weights, of two MoE layers, 50 tokens and a context of 64."""
    engine = ScriptedEngine(CONTEXT, fails, script)  # type: ignore[arg-type]
    engine.start()
    return engine


class ByLength:
    """A scorer: the longest response of a round is scored last, but none waits for another."""

    def __init__(self) -> None:
        self.under_way = self.most = 0

    async def score(self, sample: Sample) -> Sample:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001 * len(sample.response_ids))
        self.under_way -= 1
        return replace(sample, reward=float(len(sample.response_ids)))
