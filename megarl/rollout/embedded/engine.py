"""The engine contract over a batch of slots.

What is guaranteed:
- The same requests in the same order, with the same seeds and weights, give bit-identical tokens,
  log-probabilities and routes, whatever was generated before (same machine, torch build and thread count).
- A seeded request's random numbers depend on its seed alone. In another batch its logits may differ in the
  last bits (matrix kernels choose their summation order by batch size), so its tokens are the same unless a
  random number falls within that rounding of a boundary.
- Identical sequences admitted together share one prefill.
- Concurrent `generate` calls share the slots. Each call steps the whole batch, then yields to the event loop.

Not thread-safe: all calls come from the thread (and event loop) that generates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megarl.errors import UserError, did_you_mean
from megarl.rollout.embedded.batch import DecodeBatch
from megarl.rollout.embedded.job import Job
from megarl.rollout.embedded.model import HFModel
from megarl.rollout.embedded.qwen3 import Qwen3
from megarl.rollout.engine import EngineError, GenerateRequest, GenerateResult, WeightStream, check_request
from megarl.weights.fingerprint import digest


class EmbeddedEngine:
    """Samples from a `transformers` model in this process. See the module for what is reproducible.

    model: a Hugging Face folder, or a configuration, whose weights then must arrive by `update_weights`.
    slots: the most sequences that run at once; more wait. seed: of the engine's own stream, which seeds
    requests without a seed, one after the other.
    """

    def __init__(
        self,
        model: Path | str | PreTrainedConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        slots: int = 256,
        seed: int = 0,
    ):
        self.source, self.device, self.dtype = model, torch.device(device), dtype
        self.slots = slots
        self._seeds = np.random.default_rng(seed)
        self._batch: DecodeBatch | None = None
        self._has_weights = not isinstance(model, PreTrainedConfig)
        self._under_way: set[str] = set()
        self._paused = False

    @property
    def weight_version(self) -> int:
        return self._batch.version if self._batch else 0

    def urls(self) -> tuple[str, ...]:
        return ()

    def start(self) -> None:
        if self._batch is None:
            self._batch = DecodeBatch(load(self.source, self.device, self.dtype), self.slots)

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[GenerateResult]:
        """Meet `Engine.generate`. Several calls may be under way on one event loop.

        Raises UserError for a request that cannot be met, before anything of the call is sampled.
        """
        batch = self._started()
        if not self._has_weights:
            raise EngineError(f"the embedded engine cannot sample: {self.health()}")
        self._check(requests, batch.model)
        outbox: deque[GenerateResult] = deque()
        pending = {request.request_id for request in requests}
        self._under_way |= pending
        try:
            batch.add([self._job(request, batch.model, outbox) for request in requests])
            await asyncio.sleep(0)  # calls made together enter the batch together
            while pending:
                while outbox:
                    result = outbox.popleft()
                    pending.discard(result.request_id)
                    self._under_way.discard(result.request_id)
                    yield result
                if not pending:
                    break
                if self._paused:
                    await asyncio.sleep(0.001)
                else:
                    batch.step()
                    await asyncio.sleep(0)
        finally:
            if pending:  # the caller left early
                batch.drop(pending, deliver=False)
                self._under_way -= pending

    def update_weights(self, stream: WeightStream, version: int) -> dict[str, str]:
        """Load whole tensors by checkpoint name, as `Engine.update_weights` says.

        The stream is read to its end and checked before a weight changes, so that an error changes nothing;
        it takes the memory of one more copy of the weights. Tensors are cast to the engine's dtype. Requests
        under way are retracted: they keep their tokens, log-probabilities and routes so far, their keys and
        values are computed anew, and the rest of the response belongs to the new version.
        Raises UserError naming a tensor that is unknown, missing, repeated or of another shape.
        """
        batch = self._started()
        weights = batch.model.weights
        staged: dict[str, torch.Tensor] = {}
        for name, tensor in stream:
            if name not in weights:
                raise UserError(
                    f"weight {name!r}: the model has no such tensor.{did_you_mean(name, weights)}"
                )
            if name in staged:
                raise UserError(f"weight {name!r} was sent twice")
            held = weights[name]
            if tensor.shape != held.shape:
                raise UserError(
                    f"weight {name!r}: sent {tuple(tensor.shape)}, the model's is {tuple(held.shape)}"
                )
            staged[name] = tensor.detach().to(held.device, held.dtype, copy=True)
        missing = [name for name in weights if name not in staged]
        if missing:
            raise UserError(
                f"weight {missing[0]!r} was not sent ({len(missing)} of {len(weights)} are missing)"
            )
        batch.retract()
        with torch.no_grad():
            for name, tensor in staged.items():
                weights[name].copy_(tensor)
        batch.version = version
        self._has_weights = True
        return {name: digest(tensor) for name, tensor in staged.items()}

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if self._batch:
            self._batch.drop(None if request_ids is None else set(request_ids), deliver=True)

    def flush(self) -> None:
        if self._batch:
            self._batch.retract()

    def health(self) -> str | None:
        if self._batch is None:
            return "not started"
        waiting = "no weights yet: built from a configuration, waits for update_weights"
        return None if self._has_weights else waiting

    def fingerprint(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self._started().model.weights.items()}

    def close(self) -> None:
        self._batch = None
        self._has_weights = not isinstance(self.source, PreTrainedConfig)

    def _started(self) -> DecodeBatch:
        if self._batch is None:
            raise EngineError("the embedded engine is not started")
        return self._batch

    def _job(self, request: GenerateRequest, model: HFModel, outbox: deque[GenerateResult]) -> Job:
        seed = request.sampling.seed
        return Job(
            request=request,
            seed=int(self._seeds.integers(2**63)) if seed is None else seed,
            outbox=outbox,
            tokens=np.asarray(request.token_ids, dtype=np.int64),
            logprobs=np.empty(0, dtype=np.float32),
            routes=np.empty((0, *model.route_shape), dtype=model.route_dtype),
        )

    def _check(self, requests: Sequence[GenerateRequest], model: HFModel) -> None:
        """Raise UserError for the first request that the model cannot take, or whose id is in use."""
        seen = set(self._under_way)
        for request in requests:
            if request.request_id in seen:
                raise UserError(f"request {request.request_id!r}: another request with this id is under way")
            seen.add(request.request_id)
            has_routes = bool(model.route_shape[0])
            check_request(request, context=model.context, vocabulary=model.vocabulary, routes=has_routes)


def load(source: Path | str | PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> HFModel:
    """Load a folder with its weights, or a configuration (weights are then noise until they are set).

    Raises UserError for a folder without a model, an architecture transformers doesn't know, or one that the
    engine would get wrong.
    """
    if not isinstance(source, PreTrainedConfig) and not (Path(source) / "config.json").is_file():
        raise UserError(f"{source}: no Hugging Face model here (config.json is missing)")
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    try:
        if isinstance(source, PreTrainedConfig):
            refuse_unsupported(source)
            network = AutoModelForCausalLM.from_config(source, **options)
        else:
            refuse_unsupported(AutoConfig.from_pretrained(str(source)))
            network = AutoModelForCausalLM.from_pretrained(str(source), local_files_only=True, **options)
    except (ValueError, OSError) as error:
        raise UserError(f"{source}: transformers cannot load this model: {error}") from error
    network = network.to(device)
    return Qwen3(network) if Qwen3.fits(network) else HFModel(network)


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Refuse a sliding window and linear attention: the cache holds every token of every layer."""
    others = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if others:
        raise UserError(
            f"the embedded engine runs full attention only; {config.model_type} has "
            f"{', '.join(sorted(others))} layers. Use the sglang engine."
        )
