"""Adam with megatron-core's learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.megatron.settings import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings,
    model: Sequence[torch.nn.Module],
    *,
    total_steps: int,
    params_dtype: torch.dtype,
    distributed: bool,
) -> tuple[Any, OptimizerParamScheduler]:
    """Make megatron-core's optimizer, moments at zero, and its schedule. model: chunks inside DDP. total_steps:
    optimizer steps of the stage. distributed: whether moments are spread over data-parallel ranks.

    The rate of step k, counted from 1: lr * k / warmup_steps up to step warmup_steps (1 without a warm-up), which has
    the whole of lr; from there it decays so that the step after the last one would have min_lr.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=params_dtype == torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=distributed,
        ),
        list(model),
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=max(1, settings.warmup_steps),
        lr_decay_steps=max(total_steps, settings.warmup_steps, 1) + 1,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        override_opt_param_scheduler=True,  # on resume the config's word counts, not the checkpoint's
        use_checkpoint_opt_param_scheduler=False,
    )
    schedule.step(1)  # it counts the step to come: that before the first would have the rate 0
    return optimizer, schedule


def steps_taken(schedule: OptimizerParamScheduler) -> int:
    """Return the optimizer steps of the stage so far."""
    return int(schedule.num_steps) - 1


def apply_learning_rate(
    settings: OptimizerSettings, optimizer: Any, schedule: OptimizerParamScheduler
) -> None:
    """Set the config's learning rate at the step of the checkpoint that was just loaded."""
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = settings.lr, settings.min_lr
    schedule.step(0)
