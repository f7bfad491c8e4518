"""The routers' auxiliary losses (load balancing, z-loss): means over all tokens of a step, whatever the layout.

megatron-core adds their gradients in the backward pass, each times one number, which is set before it. With
`calculate_per_token_loss` its routers also multiply them by tokens, which is to make up for a division of all gradients
that megarl does not make; whose tokens these are differs between versions. So the routers are told not to, and the
number of each micro-batch is its share of the step's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.megatron.versions import router_switch

GLOBAL = "global_aux_loss"


def take_over(chunks: Sequence[torch.nn.Module], replicas: int) -> bool:
    """Make auxiliary losses independent of the layout; returns whether the model has any. Once a model.

    A loss over the tokens of all replicas comes out of megatron-core as small as if it were divided by their number.
    Raises RuntimeError for a megatron-core whose routers cannot be told.
    """
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        setattr(router, router_switch(router), False)
    config: Any = chunks[0].config
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        config.moe_aux_loss_coeff = coefficients * (replicas if kinds == GLOBAL else 1)
        used = bool(coefficients)
    else:
        weights = [replicas if kind == GLOBAL else 1 for kind in kinds]
        config.moe_aux_loss_coeff = [c * w for c, w in zip(coefficients, weights, strict=True)]
        used = any(coefficients)
    return bool(config.num_moe_experts) and bool(used or config.moe_z_loss_coeff)


def scale_before_backward(output: Tensor, share: Tensor) -> None:
    """Set the number for the micro-batch whose output of a model chunk this is, when its backward pass begins."""
    output.register_hook(partial(_set, share))


def _set(share: Tensor, gradient: Tensor) -> None:
    MoEAuxLossAutoScaler.set_loss_scale(share)
