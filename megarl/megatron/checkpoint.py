"""Model, optimizer, schedule and random states in megatron-core's distributed checkpoint format.

Every rank writes its own shards (`writing.py`); a checkpoint can be read back in another layout.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import UserError
from megarl.megatron.policy import Policy
from megarl.megatron.writing import CheckpointWrite

SHARDING = "fully_reshardable"  # optimizer state by model parameter, whatever the layout


def begin_checkpoint(folder: Path, policy: Policy, *, copied: bool) -> CheckpointWrite:
    """Plan this rank's part of a checkpoint in `folder`, which exists and is empty. Collective."""
    return CheckpointWrite(folder, _sharded_state(policy, loading=False), copied=copied)


def begin_weights(folder: Path, chunks: Sequence[GPTModel], *, copied: bool) -> CheckpointWrite:
    """As `begin_checkpoint`, of the model weights alone."""
    return CheckpointWrite(folder, _sharded_weights(chunks, _metadata()), copied=copied)


def save_checkpoint(folder: Path, policy: Policy) -> None:
    """Write a checkpoint into `folder`, which exists and is empty. Collective.

    Raises CheckpointFailed when a file can't be written.
    """
    _write(begin_checkpoint(folder, policy, copied=False))


def save_weights(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """As `save_checkpoint`, of the model weights alone."""
    _write(begin_weights(folder, chunks, copied=False))


def _write(writing: CheckpointWrite) -> None:
    writing.write()
    writing.finish()


def load_checkpoint(folder: Path, policy: Policy) -> None:
    """Fill model, optimizer, schedule and random states from `folder`, saved in any layout. Collective.

    The trainer has the optimizer of the stage that the checkpoint was saved in. Random states are those of the
    ranks, so they are taken up again only where there are as many.
    """
    wanted = _sharded_state(policy, loading=True)
    if dist_checkpointing.load_common_state_dict(str(folder)).get("world_size") != dist.get_world_size():
        del wanted["random"]
    state = dist_checkpointing.load(
        wanted, str(folder), sharded_strategy=TorchDistLoadShardedStrategy(), strict="log_all"
    )
    for number, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(state[f"model{number}"])
    _keep_step_counts(policy)
    for number, optimizer in enumerate(_parts(policy)):
        own = optimizer.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = state["optimizer_step"]
        moments = {"param_state": state[f"moments{number}"], "param_state_sharding_type": SHARDING}
        optimizer.load_state_dict({**own, **moments})
    _give_each_its_step_count(policy)
    policy.scheduler.num_steps = 0  # megatron-core adds the checkpoint's count to it
    policy.scheduler.load_state_dict(state["scheduler"])
    policy.apply_learning_rate()
    if "random" in state:
        _restore_random_states(state["random"])


def load_weights(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Fill the model weights from a checkpoint with or without an optimizer, saved in any layout. Collective.

    Raises UserError when the checkpoint is of another model.
    """
    try:
        state = dist_checkpointing.load(
            _sharded_weights(chunks, _metadata()),
            str(folder),
            sharded_strategy=TorchDistLoadShardedStrategy(),
        )
    except (CheckpointingException, CheckpointException, KeyError, OSError) as error:
        raise UserError(f"{folder}: not a whole checkpoint of the model in config.json ({error})") from error
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{number}"])


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": SHARDING,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_weights(chunks: Sequence[GPTModel], metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)}


def _sharded_state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    _allocate_moments(policy)
    metadata = _metadata()
    model_state = _sharded_weights(policy.chunks, metadata)
    state: dict[str, Any] = {**model_state}
    # Not megatron-core's ChainedOptimizer as a whole: its form depends on whether there is expert parallelism.
    for number, optimizer in enumerate(_parts(policy)):
        whole = optimizer.sharded_state_dict(
            model_state if len(model_state) > 1 else model_state["model0"],
            is_loading=loading,
            metadata=metadata,
        )
        state[f"moments{number}"] = whole["param_state"]
    state["optimizer_step"] = _step_count(policy)
    state["scheduler"] = policy.scheduler.state_dict()
    rank, size = dist.get_rank(), dist.get_world_size()
    state["world_size"] = size
    state["random"] = ShardedObject("random_states", _random_states(), (size,), (rank,), replica_id=0)
    return state


def _allocate_moments(policy: Policy) -> None:
    """Zero moments and a step count of 0 for an optimizer that has made no step yet.

    megarl's own need on a CPU: megatron-core reads the step count of torch's AdamW from its state, which is empty
    before the first step.
    """
    for optimizer in _parts(policy):
        inner = optimizer.optimizer
        if inner.state or not isinstance(inner, torch.optim.AdamW | torch.optim.Adam):
            continue
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = 0.0
        optimizer._init_optimizer_states_with_dummy_values()
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in inner.state.values():
            state["step"].zero_()


def _parts(policy: Policy) -> list[Any]:
    """megatron-core's optimizers of this rank: one for dense parameters, one for experts.

    With expert parallelism a pipeline stage of dense layers alone has an empty second one, which has no state and no
    step count.
    """
    return [
        part for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]) if part.buffers
    ]


def _step_count(policy: Policy) -> int:
    """Optimizer steps so far; the same for every parameter."""
    counts = {
        int(group.get("step", 0))
        for optimizer in _parts(policy)
        for group in optimizer.state_dict()["optimizer"]["param_groups"]
    }
    assert len(counts) == 1, f"parameters disagree about the step: {counts}"
    return counts.pop()


def _keep_step_counts(policy: Policy) -> None:
    """megatron-core loads every entry of torch's AdamW state from the checkpoint's tensors, where the step count is
    not (it is in the parameter groups, and set before): give it back its own."""
    for optimizer in _parts(policy):

        def load(parameter: Any, tensors: Any, optimizer: Any = optimizer) -> None:
            now = optimizer._get_main_param_and_optimizer_states(parameter)
            type(optimizer)._set_main_param_and_optimizer_states(
                optimizer, parameter, {**{k: v for k, v in now.items() if k == "step"}, **tensors}
            )

        optimizer._set_main_param_and_optimizer_states = load


def _give_each_its_step_count(policy: Policy) -> None:
    """After loading, all parameters share one step tensor, which each of them would count up."""
    for optimizer in _parts(policy):
        for state in optimizer.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
