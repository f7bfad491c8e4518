"""The Megatron training step: packed micro-batches in, per-token log-probabilities to a loss, gradients summed,
one optimizer step.

The loss belongs to the caller: it is a function of one micro-batch's log-probabilities and entropies whose token
weights were decided on the global batch. Nothing here divides: gradients are summed over micro-batches, data and
context parallelism (see "Token weights" in the design).
"""

from __future__ import annotations

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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, clear_aux_losses_tracker
from torch import Tensor

from megarl.megatron.attention import PackedSequences, packed
from megarl.megatron.groups import Groups
from megarl.megatron.logprobs import vocabulary_logprobs
from megarl.megatron.model import Architecture, build_model, head_weight, vocabulary_shard
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout, ModelSettings, OptimizerSettings
from megarl.megatron.sharding import SequenceSharding, shard_layout
from megarl.records import MicroBatch
from megarl.routing.agreement import RoutingCounts, pack_counts, summed
from megarl.routing.replay import LayerRoutes, Replay, Routes
from megarl.routing.trace import LIVE

# micro-batch number, what the head computes by input position (a policy's: log-probabilities [tokens], entropies
# [tokens]; a critic's: values [tokens]) -> loss (scalar), anything to collect
LossFunction = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True)
class StepResult:
    """collected: what the loss function gave for each micro-batch, in order (on the last pipeline stage, else
    empty). grad_norm before clipping; stepped False when the gradient was not finite and nothing was changed."""

    collected: list[Any]
    grad_norm: float
    lr: float
    stepped: bool


def _finalize_without_dividing(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """megatron-core would divide the gradients by the token count; here the weights are in the loss already."""
    finalize_model_grads(model, None, **kwargs)


def _scale_auxiliary_losses(scale: Tensor, gradient: Tensor) -> None:
    """Before the backward pass of a model chunk."""
    MoEAuxLossAutoScaler.set_loss_scale(scale)


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
        recomputed = self.config.recompute_granularity == "full" or (
            self.config.recompute_granularity == "selective"
            and "moe" in (self.config.recompute_modules or ())
        )
        self.replay = Replay(self.chunks, recomputed) if architecture.num_experts else None
        self.config.finalize_model_grads_func = _finalize_without_dividing
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
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                bf16=self.config.params_dtype == torch.bfloat16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=self.distributed_optimizer,
            ),
            self.model,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(total_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            override_opt_param_scheduler=True,  # on resume the config's word counts, not the checkpoint's
            use_checkpoint_opt_param_scheduler=False,
        )
        self._optimizer_settings = settings
        self.config.grad_scale_func = self.optimizer.scale_loss
        if settings.warmup_steps:
            # megatron-core starts at init_lr = 0: the first step would change nothing
            self.scheduler.step(1)

    def apply_learning_rate(self) -> None:
        """After a checkpoint was loaded: the config's learning rate at the checkpoint's step."""
        for group in self.optimizer.param_groups:
            group["max_lr"] = self._optimizer_settings.lr
            group["min_lr"] = self._optimizer_settings.min_lr
        self.scheduler.step(0)

    # -- passes ---------------------------------------------------------------------------------------------------

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        temperature: float = 1.0,
        routes: Routes | None = None,
        count_routes: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies (float32 [tokens] each, on the CPU) of every micro-batch, without
        gradients; on every rank of the replica. All replicas call it with equally many micro-batches. routes,
        count_routes: as in `step`."""

        with self._following(routes, len(micro_batches), force=True, backward=False, counted=count_routes):
            return self.evaluate(micro_batches, temperature=temperature)  # type: ignore[return-value]

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0
    ) -> list[tuple[Tensor, ...]]:
        """What the head computes for every micro-batch, on the CPU, without gradients; as `logprobs`."""

        def keep(number: int, *vectors: Tensor) -> tuple[Tensor, Any]:
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
        routes: Routes | None = None,
        force_routes: bool = True,
        count_routes: bool = False,
    ) -> StepResult:
        """Forward and backward over the micro-batches, then one optimizer step.

        All replicas call it with equally many micro-batches (filler ones make them equal). routes: to replay, or
        without `force_routes` to compare with (see `routing.replay`). count_routes: for `routing_counts`.
        """
        for ddp in self.model:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._following(
            routes, len(micro_batches), force=force_routes, backward=True, counted=count_routes
        ):
            collected = self._run(micro_batches, loss, temperature, forward_only=False)
        lr = float(self.optimizer.param_groups[0]["lr"])
        stepped, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        return StepResult(collected, float(grad_norm or 0.0), lr, bool(stepped))

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        temperature: float,
        *,
        forward_only: bool,
    ) -> list[Any]:
        sizes = self._common_sizes(micro_batches)
        balance = None if forward_only else self._balance_scale(micro_batches, sizes)

        def numbered() -> Iterator[tuple[int, MicroBatch]]:
            yield from enumerate(micro_batches)

        def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[Tensor, Any]:
            number, micro_batch = next(iterator)
            micro_batch = self._on_device(micro_batch)
            sharding = self._sharding(micro_batch, at_least=sizes[number])
            here = sharding.local(self._context_rank)
            if self.replay is not None:
                real = sharding.source[self._shard(sharding)] >= 0
                self.replay.begin(self.model.index(model), number, real & bool(len(micro_batch.rows)))
            output = model(
                sharding.take(micro_batch.token_ids, here)[None],
                None,  # rotary embeddings know their positions from the sequences' bounds
                None,
                packed_seq_params=self._packed(sharding),
            )

            if balance is not None:
                output.register_hook(partial(_scale_auxiliary_losses, balance))

            def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                vectors = self._head(model, hidden, micro_batch, sharding, temperature)
                value, collected = loss(number, *vectors)
                return value, torch.ones((), dtype=torch.int, device=value.device), collected

            return output, loss_of

        return get_forward_backward_func()(  # type: ignore[no-any-return]
            forward_step_func=forward_step,
            data_iterator=[numbered() for _ in self.model] if len(self.model) > 1 else numbered(),
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=len(micro_batches),
            seq_length=max((m.tokens for m in micro_batches), default=0),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _balance_scale(self, micro_batches: Sequence[MicroBatch], sizes: Sequence[int]) -> Tensor | None:
        """megarl's need: megatron-core multiplies an auxiliary loss by a rank's tokens and means to divide the gradient
        by all tokens afterwards, which `_finalize_without_dividing` does not. None without such losses."""
        coefficient = self.config.moe_aux_loss_coeff
        used = any(coefficient) if isinstance(coefficient, list) else bool(coefficient)
        if not self.architecture.num_experts or not (used or self.config.moe_z_loss_coeff):
            return None
        clear_aux_losses_tracker()
        own = sum(len(self._sharding(m, n).source) for m, n in zip(micro_batches, sizes, strict=True))
        tokens = torch.tensor(own / self.layout.tensor / self.layout.context, device=self.platform.device)
        return 1 / self.groups.sum_over_replicas(tokens)

    # -- routing --------------------------------------------------------------------------------------------------

    def _following(
        self, routes: Routes | None, count: int, *, force: bool, backward: bool, counted: bool
    ) -> AbstractContextManager[None]:
        if routes is None:
            return nullcontext()
        assert self.replay is not None, "a dense model has no routes"
        return self.replay.following(routes, count, force=force, backward=backward, counted=counted)

    def local_routes(
        self, micro_batches: Sequence[MicroBatch], packed_routes: Callable[[int], Tensor]
    ) -> Routes:
        """Routes as routers want them, of routes by input position. Collective.

        packed_routes: micro-batch number -> int16 [tokens, this rank's MoE layers in model order, top_k].
        """
        assert self.replay is not None
        sizes = self._common_sizes(micro_batches)
        layers = self.replay.layers

        def routes(number: int) -> LayerRoutes:
            sharding = self._sharding(micro_batches[number], at_least=sizes[number])
            mine = self._shard(sharding)
            columns = iter(sharding.take(packed_routes(number), mine, LIVE).unbind(1))
            return [[next(columns) for _ in chunk] for chunk in layers]

        return routes

    def routing_counts(self) -> RoutingCounts:
        """Of the last pass, if it counted them, summed over all ranks. Collective."""
        assert self.replay is not None
        layers, experts = self.architecture.moe_layers, self.architecture.num_experts
        known = self._changed_tokens(self.replay.take_rows())
        by_layer = {
            layer: (c.routes, c.changed, c.tokens, c.entropy, c.load)
            for layer, c in self.replay.take_counts().items()
        }
        vector = pack_counts(layers, experts, by_layer, known[0], known[1])
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

    def _sharding(self, micro_batch: MicroBatch, at_least: int = 0) -> SequenceSharding:
        layout = self.layout
        return shard_layout(
            micro_batch.cu_seqlens, context=layout.context, tensor=layout.tensor, at_least=at_least
        )

    def _shard(self, sharding: SequenceSharding) -> Tensor:
        """Which padded positions this rank's routers see."""
        return sharding.shard(self._context_rank, parallel_state.get_tensor_model_parallel_rank())

    def _common_sizes(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Padded tokens that each micro-batch must have at least: those of the largest replica where the token
        dispatcher gathers equal shares from all experts' ranks, else 0."""
        if self.config.moe_token_dispatcher_type != "allgather" or not self.architecture.num_experts:
            return [0] * len(micro_batches)
        sizes = torch.tensor(
            [len(self._sharding(m).source) for m in micro_batches], device=self.platform.device
        )
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.groups.peers_group)
        return sizes.tolist()  # type: ignore[no-any-return]

    @property
    def _context_group(self) -> dist.ProcessGroup | None:
        return parallel_state.get_context_parallel_group() if self.layout.context > 1 else None

    @property
    def _context_rank(self) -> int:
        return parallel_state.get_context_parallel_rank()

    def _packed(self, sharding: SequenceSharding) -> PackedSeqParams:
        if self.platform.transformer_engine:
            return PackedSeqParams(**packed(sharding))
        return PackedSequences.make(sharding, self._context_group)

    def _on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        names = ("token_ids", "position_ids", "labels", "mask", "cu_seqlens")
        device = self.platform.device
        return replace(micro_batch, **{name: getattr(micro_batch, name).to(device) for name in names})

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
        here = sharding.local(self._context_rank)
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
        return self._by_input_position(everywhere, sharding)

    def _by_input_position(self, here: Tensor, sharding: SequenceSharding) -> tuple[Tensor, ...]:
        """This rank's [tokens here, n] -> n vectors [tokens]."""
        if self._context_group is not None:
            # every context rank computes the same loss from all tokens and keeps its own tokens' gradient
            here = gather_from_sequence_parallel_region(
                here, tensor_parallel_output_grad=False, group=self._context_group
            )
        return here[sharding.restore].unbind(1)
