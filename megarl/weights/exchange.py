"""Weights in and out of a policy by their Hugging Face names: load a checkpoint, yield whole tensors to engines
and files. Both are collective: every rank calls them, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.errors import UserError, did_you_mean
from megarl.weights.checkpoint_files import CheckpointReader
from megarl.weights.families.base import Item
from megarl.weights.mapping import NameMap

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NUMBERS = ("F32", "BF16", "F16", "F64")  # safetensors' names of what weights may be stored as


def check_coverage(name_map: NameMap, reader: CheckpointReader) -> None:
    """Check that each checkpoint tensor is mapped exactly once, nothing is missing, and the shapes of this rank's
    tensors are the config's. Raises UserError that names the first at fault. Only file headers are read, but for a
    tied LM head that the checkpoint stores all the same: it must be the embedding.

    Such a head, rotary tables, and what the family leaves out on purpose are no surplus.
    """
    wanted = [name for item in name_map.items for name in item.hf]
    assert len(wanted) == len(set(wanted)), "a name map names a tensor twice"
    have = reader.names()
    if missing := [name for name in wanted if name not in have]:
        raise UserError(
            f"{reader.folder}: {len(missing)} tensor(s) missing that config.json calls for, first "
            f"{missing[0]!r}.{did_you_mean(missing[0], have - set(wanted))}"
        )
    harmless = {HEAD} if name_map.model.architecture.tied_embeddings else set()
    surplus = sorted(
        name
        for name in have - set(wanted) - harmless
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(name_map.ignored)
    )
    if surplus:
        raise UserError(
            f"{reader.folder}: {len(surplus)} tensor(s) that config.json does not call for, first {surplus[0]!r}"
        )
    _check_shapes(name_map, reader)
    if HEAD in harmless & have and not reader.same(HEAD, EMBEDDING):
        raise UserError(
            f"{reader.folder}: config.json and tensors disagree: tie_word_embeddings is true, but {HEAD!r} differs "
            f"from {EMBEDDING!r}: set tie_word_embeddings to false, or remove the tensor that is not the model's"
        )


def _check_shapes(name_map: NameMap, reader: CheckpointReader) -> None:
    for name in (name for item in name_map.items for name in item.hf):
        if reader.kind(name) not in NUMBERS:
            raise UserError(
                f"{reader.folder}: {name!r} is {reader.kind(name)}: quantized weights are not supported; convert the "
                "checkpoint to bfloat16 first"
            )
    local = name_map.local_tensors()
    for item in name_map.items:
        if (tensor := local.pop(item.name, None)) is None:
            continue
        size = _tensor_group(item).size()
        whole = torch.empty(item.transform.whole_shape(tensor, size), device="meta")
        for name, expected in zip(item.hf, item.transform.separate(whole), strict=True):
            if reader.shape(name) != tuple(expected.shape):
                raise UserError(
                    f"{reader.folder}: config.json and tensors disagree: {name!r} is {list(reader.shape(name))}, "
                    f"config.json calls for {list(expected.shape)}"
                )
    assert not local, f"tensors without a name in the map: {sorted(local)}"


@torch.no_grad()
def load(name_map: NameMap, reader: CheckpointReader) -> None:
    """Fill this rank's parameters from an HF checkpoint; memory: its shard plus one HF tensor at a time.

    Raises UserError that names a missing, surplus or misshapen tensor, or a file that cannot be read.
    """
    check_coverage(name_map, reader)
    tensors = name_map.local_tensors()
    for item in name_map.items:
        if (tensor := tensors.get(item.name)) is not None:
            group = _tensor_group(item)
            for number, name in enumerate(item.hf):
                part = reader.read(name)
                item.transform.copy_into_shard(tensor.data, part, number, group.rank(), group.size())
    if name_map.model.optimizer is not None:
        name_map.model.optimizer.reload_model_params()


def _tensor_group(item: Item) -> dist.ProcessGroup:
    """Return the ranks over which tensor parallelism splits the item's tensor."""
    if item.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def iter_hf_tensors(
    name_map: NameMap, value: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by HF name, on every rank; each tensor exactly once. Collective.

    value: what to yield for a parameter or expert bias, of its shape (its gradient, say); by default itself.

    Experts come a layer's projection at a time: one gather over expert and tensor parallelism for all of them.
    """
    tensors = name_map.local_tensors()

    def kind(item: Item) -> str:
        return (
            item.name if item.expert is None else item.name.replace(f"experts.{item.expert}.", "experts.*.")
        )

    ordered = sorted(name_map.items, key=lambda item: (_layer_of(item), kind(item)))
    for _, group in groupby(ordered, key=kind):
        items = list(group)
        here = [value(tensors[item.name]) for item in items if item.name in tensors]
        for item, whole in zip(items, _gather(name_map, items, here), strict=True):
            yield from zip(item.hf, item.transform.separate(whole), strict=True)


def _layer_of(item: Item) -> int:
    parts = item.name.split(".")
    return int(parts[2]) if parts[:2] == ["decoder", "layers"] else -1


def _gather(name_map: NameMap, items: list[Item], here: list[Tensor]) -> list[Tensor]:
    """Gather the items' whole tensors from everybody's shards: over tensor parallelism, experts, then pipeline
    stages."""
    layout, transform = name_map.model.layout, items[0].transform
    local: list[Tensor] = []
    if here:
        stacked = torch.stack([p.detach() for p in here])  # [local experts or 1, ...]
        group = _tensor_group(items[0])
        split = transform.axis is not None and group.size() > 1
        shards = _all_gather(stacked, group) if split else [stacked]
        local = [transform.unshard([s[n] for s in shards]) for n in range(len(here))]
        if items[0].expert is not None and layout.expert > 1:
            gathered = _all_gather(torch.stack(local), parallel_state.get_expert_model_parallel_group())
            local = [whole for part in gathered for whole in part]
    return local if layout.pipeline == 1 else _share_over_stages(local)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _share_over_stages(local: list[Tensor]) -> list[Tensor]:
    """Send tensors from the first pipeline stage that holds them to all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    mine = (len(local), tuple(local[0].shape), local[0].dtype) if local else None
    held: list[tuple[int, tuple[int, ...], torch.dtype] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, mine, group=group)
    owner = next(n for n, what in enumerate(held) if what is not None)
    count, shape, dtype = held[owner]  # type: ignore[misc]
    source = dist.get_global_rank(group, owner)
    if dist.get_rank() == source:
        stacked = torch.stack(local)
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        stacked = torch.empty(count, *shape, dtype=dtype, device=device)
    dist.broadcast(stacked, src=source, group=group)
    return list(stacked)
