"""Jobs that the weight tests run on several ranks."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.data.packing import make_micro_batches
from megarl.errors import UserError
from megarl.megatron.checkpoint import save_checkpoint
from megarl.megatron.groups import Groups, initialize
from megarl.megatron.platform import Platform
from megarl.megatron.policy import Policy
from megarl.megatron.settings import Layout, ModelSettings, OptimizerSettings
from megarl.weights.checkpoint_files import CheckpointReader, read_config, write_checkpoint
from megarl.weights.convert import convert
from megarl.weights.exchange import iter_hf_tensors, load
from megarl.weights.families import family_of
from megarl.weights.mapping import NameMap
from tests.megatron.jobs import make_samples
from tests.weights.families import VOCABULARY


@dataclass
class World:
    layout: Layout
    platform: Platform
    groups: Groups

    @classmethod
    def join(cls, layout: Mapping[str, Any]) -> World:
        platform, shape = Platform.detect("cpu"), Layout(**layout)
        return cls(shape, platform, initialize(shape, platform, seed=1))

    def policy(self, folder: Path) -> tuple[Policy, NameMap]:
        config = read_config(folder)
        policy = Policy(
            family_of(config).architecture(config),
            self.layout,
            self.platform,
            self.groups,
            ModelSettings(dtype="float32"),
            distributed_optimizer=self.layout.context == 1,  # it would leave each rank a part of the gradient
        )
        return policy, NameMap(config, policy)


def families_job(
    folders: Mapping[str, Path], written: Path, layout: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """For each family: load, log-probabilities of a fixed batch, write back below `written`, one training step.

    Of every family: `logprobs` by sample, the gradient's `norm`, and on one replica whole gradients by HF name.
    """
    world = World.join(layout)
    found = {}
    for name, folder in folders.items():
        policy, name_map = world.policy(folder)
        load(name_map, CheckpointReader(folder))
        tensors = iter_hf_tensors(name_map)
        if world.groups.is_main:
            config = read_config(folder)
            write_checkpoint(
                written / name, tensors, config=config, assets=folder, dtype=torch.float32, shard_bytes=30_000
            )
        for _ in tensors:
            pass
        found[name] = _numbers(policy, name_map, world.groups)
    return found


def _numbers(policy: Policy, name_map: NameMap, groups: Groups) -> dict[str, Any]:
    samples = make_samples(5, VOCABULARY)
    mine = samples[groups.replica_index :: groups.replica_count]
    count = groups.max_over_replicas(len(make_micro_batches(mine, 100)))
    micro_batches = make_micro_batches(mine, 100, count)
    logprobs = {}
    for micro_batch, (values, _) in zip(micro_batches, policy.compute_logprobs(micro_batches), strict=True):
        bounds = micro_batch.cu_seqlens.tolist()
        for n, row in enumerate(micro_batch.rows.tolist()):
            logprobs[mine[row].sample_id] = values[bounds[n] : bounds[n + 1]]
    policy.set_optimizer(OptimizerSettings(lr=1e-3))
    step = policy.step(micro_batches, lambda micro_batch, values, entropies: (-values.sum() / 50, None))
    biases = {n: t.clone() for n, t in name_map.local_tensors().items() if n.endswith("expert_bias")}
    gradients = {}
    if groups.replica_count == 1:
        gradients = {
            n: t.clone()
            for n, t in iter_hf_tensors(name_map, lambda t: getattr(t, "main_grad", torch.zeros_like(t)))
        }
    everyone = groups.gather_from_replicas(logprobs)
    return {
        "logprobs": {k: v for part in everyone for k, v in part.items()},
        "norm": step.grad_norm,
        "gradients": gradients,
        "biases": biases,
    }


def load_job(folders: Mapping[str, Path], layout: Mapping[str, Any]) -> dict[str, str | None]:
    """What loading each folder tells the user; None when it loads."""
    world = World.join(layout)
    told: dict[str, str | None] = {}
    for name, folder in folders.items():
        try:
            _, name_map = world.policy(folder)
            load(name_map, CheckpointReader(folder))
            told[name] = None
        except UserError as error:
            told[name] = str(error)
    return told


def memory_job(folder: Path, layout: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of resident memory before loading, and by how much it grew at its peak while loading."""
    _, name_map = World.join(layout).policy(folder)
    for tensor in name_map.local_tensors().values():
        tensor.data.fill_(1.0)  # every page of the shard is there already
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    load(name_map, CheckpointReader(folder))
    return {"before": before, "growth": _status("VmHWM") - before}


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def convert_job(
    source: Path, target: Path, layout: Mapping[str, Any], config_folder: Path | None = None
) -> str:
    return convert(source, target, layout=Layout(**layout), config_folder=config_folder, dtype="auto")


def trained_checkpoint_job(folder: Path, written: Path, layout: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One training step, then a whole training checkpoint in `written`; the weights by HF name."""
    world = World.join(layout)
    policy, name_map = world.policy(folder)
    load(name_map, CheckpointReader(folder))
    _numbers(policy, name_map, world.groups)
    if world.groups.is_main:
        written.mkdir()
    world.groups.barrier()
    save_checkpoint(written, policy)
    return {name: tensor.clone() for name, tensor in iter_hf_tensors(name_map)}
