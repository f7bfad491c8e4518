"""The policy on this rank: packed micro-batches in, per-token log-probabilities to a loss, gradients summed, one
optimizer step.

The loss belongs to the caller: it is a function of one micro-batch and its log-probabilities and entropies, with token
weights that were decided on the global batch. Nothing here divides: gradients are summed over micro-batches, data and
context parallelism (see "Token weights" in the design).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron import auxiliary
from megarl.megatron.groups import Groups
from megarl.megatron.logprobs import vocabulary_logprobs
from megarl.megatron.model import Architecture, build_model, head_weight, vocabulary_shard
from megarl.megatron.optimizer import apply_learning_rate, make_optimizer, steps_taken
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout, ModelSettings, OptimizerSettings
from megarl.megatron.sharding import SequenceSharding
from megarl.megatron.shards import RankShards
from megarl.records import MicroBatch
from megarl.routing.agreement import RoutingCounts, pack_counts, summed
from megarl.routing.replay import Mode, Replay
from megarl.routing.trace import LIVE

# A micro-batch on the device and what the head computes by input position (a policy's: log-probabilities [tokens],
# entropies [tokens]; a critic's: values [tokens]) -> loss (scalar), anything to collect.
LossFunction = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True)
class StepResult:
    """collected: what the loss function gave for each micro-batch, in order (on the last pipeline stage, else
    empty). grad_norm before clipping; stepped False when the gradient was not finite and nothing was changed: no
    weight, no moment, no step count, and the learning rate stays where it is in its schedule."""

    collected: list[Any]
    grad_norm: float
    lr: float
    stepped: bool


def _finalize_without_dividing(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """megatron-core would divide the gradients by the token count; here the weights are in the loss already."""
    finalize_model_grads(model, None, **kwargs)


class Policy:
    """This rank's part of the policy, its gradients and its optimizer.

    `model` holds the megatron-core chunks inside DDP; `weights/` reads and writes them by HF name.
    """

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        platform: Platform,
        groups: Groups,
        settings: ModelSettings,
        *,
        logprob_chunk: int = 1024,
        distributed_optimizer: bool = True,
        value_head: bool = False,
    ) -> None:
        self.architecture = architecture
        self.layout = layout
        self.platform = platform
        self.groups = groups
        self.settings = settings
        self.logprob_chunk = logprob_chunk
        self.distributed_optimizer = distributed_optimizer
        chunks = build_model(architecture, layout, platform, settings, value_head=value_head)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=False,
            check_for_nan_in_grad=False,
        )
        self.model = [
            DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        self.config = chunks[0].config
        self._auxiliary = auxiliary.take_over(chunks, groups.replica_count)
        recomputed = self.config.recompute_granularity == "full" or (
            self.config.recompute_granularity == "selective"
            and "moe" in (self.config.recompute_modules or ())
        )
        self.replay = Replay(self.chunks, recomputed) if architecture.num_experts else None
        self.config.finalize_model_grads_func = _finalize_without_dividing
        equal_shares = bool(architecture.num_experts) and self.config.moe_token_dispatcher_type == "allgather"
        self.shards = RankShards(layout, platform, groups, equal_shares)
        self.optimizer: Any = None
        self.scheduler: Any = None

    @property
    def chunks(self) -> list[GPTModel]:
        return [ddp.module for ddp in self.model]

    @property
    def micro_batch_multiple(self) -> int:
        """The interleaved pipeline schedule takes micro-batches in multiples of the pipeline's length."""
        return self.layout.pipeline if self.layout.virtual_pipeline else 1

    # -- optimizer ------------------------------------------------------------------------------------------------

    def set_optimizer(self, settings: OptimizerSettings, total_steps: int = 1) -> None:
        """Begin with a fresh optimizer, moments at zero, and a schedule that decays over `total_steps` optimizer steps;
        each training stage has its own."""
        for ddp in self.model:
            self.platform.prepare_parameters(ddp)
        self.optimizer, self.scheduler = make_optimizer(
            settings,
            self.model,
            total_steps=total_steps,
            params_dtype=self.config.params_dtype,
            distributed=self.distributed_optimizer,
        )
        self._optimizer_settings = settings
        self.config.grad_scale_func = self.optimizer.scale_loss

    @property
    def steps_taken(self) -> int:
        """Optimizer steps that this stage has taken, those before a resume included."""
        return steps_taken(self.scheduler)

    def apply_learning_rate(self) -> None:
        """Set the config's learning rate at the step of the checkpoint that was just loaded."""
        apply_learning_rate(self._optimizer_settings, self.optimizer, self.scheduler)

    # -- passes ---------------------------------------------------------------------------------------------------

    def compute_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        temperature: float = 1.0,
        replay: Mode = "live",
        count_routes: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute the log-probabilities and entropies (float32 [tokens] each, on the CPU) of every micro-batch, without
        gradients; on every rank of the replica. All replicas call it with equally many micro-batches. replay,
        count_routes: as in `step`."""
        with self._replaying(replay, len(micro_batches), backward=False, counted=count_routes):
            return self.evaluate(micro_batches, temperature=temperature)  # type: ignore[return-value]

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0
    ) -> list[tuple[Tensor, ...]]:
        """Compute what the head gives for every micro-batch, on the CPU, without gradients; as `compute_logprobs`."""

        def keep(micro_batch: MicroBatch, *vectors: Tensor) -> tuple[Tensor, Any]:
            return vectors[0].sum(), tuple(vector.cpu() for vector in vectors)

        for ddp in self.model:
            ddp.eval()
        with torch.no_grad():
            collected = self._run(micro_batches, keep, temperature, forward_only=True)
        for ddp in self.model:
            ddp.train()
        return self.groups.share_from_last_stage(collected)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        replay: Mode = "live",
        count_routes: bool = False,
    ) -> StepResult:
        """Run forward and backward over the micro-batches, then one optimizer step, unless a gradient is not finite.

        All replicas call it with equally many micro-batches (filler ones make them equal). replay: whether routers
        follow the micro-batches' routes ("replay"), are compared with them ("observe") or choose for themselves
        ("live"), see `routing.replay`. count_routes: for `routing_counts`.
        """
        for ddp in self.model:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        biases = [(bias, bias.clone()) for bias in self._router_biases()]
        with self._replaying(replay, len(micro_batches), backward=True, counted=count_routes):
            collected = self._run(micro_batches, loss, temperature, forward_only=False)
        lr = float(self.optimizer.param_groups[0]["lr"])
        square = self._gradient_square()
        if not math.isfinite(square):
            for bias, before in biases:
                bias.copy_(before)
            return StepResult(collected, math.sqrt(square), lr, stepped=False)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        return StepResult(collected, float(grad_norm or 0.0), lr, stepped=True)

    def _gradient_square(self) -> float:
        """Sum up the squares of all gradients on all ranks, copies included: one number, the same everywhere, which is
        finite only if each of them is. Collective."""
        gradients = [b.grad_data for ddp in self.model for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
        square = torch.zeros((), device=self.platform.device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient).square()
        dist.all_reduce(square)
        return float(square)

    def _router_biases(self) -> list[Tensor]:
        """Give the weights that megatron-core updates with the gradients, not in the optimizer's step."""
        return [
            b for chunk in self.chunks for name, b in chunk.named_buffers() if name.endswith("expert_bias")
        ]

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """Whether this rank's weights are finite, all of them."""
        weights = (w for chunk in self.chunks for w in (*chunk.parameters(), *chunk.buffers()))
        return all(bool(w.isfinite().all()) for w in weights)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        temperature: float,
        *,
        forward_only: bool,
    ) -> list[Any]:
        sizes = self.shards.least_sizes(micro_batches)
        auxiliary_losses = self._auxiliary and not forward_only
        shares = self._shares_of_tokens(micro_batches, sizes) if auxiliary_losses else [None] * len(sizes)

        def sized() -> Iterator[tuple[MicroBatch, int, Tensor | None]]:
            yield from zip(micro_batches, sizes, shares, strict=True)

        def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
            micro_batch, size, share = next(iterator)
            micro_batch = self._on_device(micro_batch)
            sharding = self.shards.sharding(micro_batch, at_least=size)
            if self.replay is not None:
                routed = self.shards.router_tokens(sharding)
                real = (sharding.source[routed] >= 0) & bool(len(micro_batch.rows))
                take = partial(sharding.take, positions=routed, padding=LIVE)
                self.replay.begin(self.model.index(model), micro_batch.routes, take, real)
            output = model(
                sharding.take(micro_batch.token_ids, self.shards.context_tokens(sharding))[None],
                None,  # rotary embeddings know their positions from the sequences' bounds
                None,
                packed_seq_params=self.shards.attention_input(sharding),
            )

            if share is not None:
                auxiliary.scale_before_backward(output, share)

            def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                vectors = self._head(model, hidden, micro_batch, sharding, temperature)
                value, collected = loss(self._with_columns_on_device(micro_batch), *vectors)
                return value, torch.ones((), dtype=torch.int, device=value.device), collected

            return output, loss_of

        return get_forward_backward_func()(  # type: ignore[no-any-return]
            forward_step_func=forward_step,
            data_iterator=[sized() for _ in self.model] if len(self.model) > 1 else sized(),
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=len(micro_batches),
            seq_length=max((m.tokens for m in micro_batches), default=0),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _shares_of_tokens(
        self, micro_batches: Sequence[MicroBatch], sizes: Sequence[int]
    ) -> Sequence[Tensor]:
        """Each micro-batch's share of the padded tokens of all micro-batches of all replicas. Collective."""
        own = [len(self.shards.sharding(m, n).source) for m, n in zip(micro_batches, sizes, strict=True)]
        tokens = torch.tensor(own, dtype=torch.float32, device=self.platform.device)
        return (tokens / self.groups.sum_over_replicas(tokens.sum())).unbind()

    def _on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        names = ("token_ids", "position_ids", "labels", "mask", "cu_seqlens")
        device = self.platform.device
        return replace(micro_batch, **{name: getattr(micro_batch, name).to(device) for name in names})

    def _with_columns_on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        columns = {name: column.to(self.platform.device) for name, column in micro_batch.columns.items()}
        return replace(micro_batch, columns=columns)

    def _head(
        self,
        model: Any,
        hidden: Tensor,
        micro_batch: MicroBatch,
        sharding: SequenceSharding,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """[1, this rank's tokens, hidden] -> log-probabilities and entropies [tokens] by input position, exactly 0
        where the mask is not set; whole on every rank, the gradient flowing into this rank's tokens."""
        hidden = hidden.squeeze(0)
        if self.layout.tensor > 1:
            hidden = gather_from_sequence_parallel_region(hidden)
        here = self.shards.context_tokens(sharding)
        active = sharding.take(micro_batch.mask, here, False).nonzero().squeeze(1)
        both = vocabulary_logprobs(
            hidden[active],
            head_weight(model.module if hasattr(model, "module") else model),
            sharding.take(micro_batch.labels, here)[active],
            vocabulary_shard(self.architecture, self.layout),
            temperature=temperature,
            chunk=self.logprob_chunk,
            float32=self.settings.float32_lm_head,
        )
        everywhere = hidden.new_zeros(len(here), 2, dtype=torch.float32)
        everywhere = everywhere.index_put((active,), torch.stack(both, dim=1))
        return self.shards.by_input_position(everywhere, sharding)

    # -- routing --------------------------------------------------------------------------------------------------

    def _replaying(
        self, mode: Mode, count: int, *, backward: bool, counted: bool
    ) -> AbstractContextManager[None]:
        if mode == "live":
            return nullcontext()
        assert self.replay is not None, "a dense model has no routes"
        return self.replay.replaying(mode, count, backward=backward, counted=counted)

    def routing_counts(self) -> RoutingCounts:
        """Sum up, over all ranks, the counts of the last pass that counted them. Collective."""
        assert self.replay is not None
        layers, experts = self.architecture.moe_layers, self.architecture.num_experts
        known = self._changed_tokens(self.replay.take_rows())
        vector = pack_counts(layers, experts, self.replay.take_counts(), known[0], known[1])
        dist.all_reduce(vector)
        return summed(layers, vector.cpu(), experts)

    def _changed_tokens(self, rows: Tensor | None) -> Tensor:
        """[2]: this rank's tokens with a given route, and those that differ in any layer of any stage; counted on the
        first stage alone."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        size = torch.tensor(0 if rows is None else rows.shape[1], device=self.platform.device)
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=stages)
        both = torch.zeros(2, int(size), dtype=torch.int64, device=size.device)
        if rows is not None:
            both += rows
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=stages)
        return both.sum(1).double() * parallel_state.is_pipeline_first_stage(ignore_virtual=True)
