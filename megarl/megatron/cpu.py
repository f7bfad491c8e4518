"""megatron-core on a CPU: every adaptation it needs, in this one file.

megatron-core assumes CUDA in a few dozen places: `torch.cuda.current_device()` as a device, `device="cuda"`
literals, CUDA streams and RNG states. Nothing of torch is patched for that. Each megatron-core module that needs
it gets a *view* of torch as its module-level name `torch`: the same library, except that devices come out as the
CPU and `torch.cuda` is a stand-in without streams. A few functions that a view cannot reach are replaced by name.

`ADAPTATIONS` lists what is adapted and quotes the megatron-core line that needs it; `check()` looks for those
lines in the installed version, so an upgrade that moves things fails loudly, by name, before the first step.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.megatron import versions

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Adaptation:
    """One place in megatron-core that assumes CUDA.

    module: the megatron-core module, below `megatron.core`.
    because: a fragment of its source that needs the adaptation.
    name: the function to replace; None = the module gets the CPU view of torch.
    replacement: what stands in for that function, or for a flag.
    """

    module: str
    because: str
    name: str | None = None
    replacement: Callable[..., Any] | bool | None = None

    def load(self) -> types.ModuleType:
        return importlib.import_module(f"megatron.core.{self.module}")

    def problem(self) -> str | None:
        """What no longer fits the installed megatron-core, or None."""
        try:
            source = inspect.getsource(self.load())
        except ImportError as error:
            return f"megatron.core.{self.module}: {error}"
        if self.because not in source:
            return f"megatron.core.{self.module} no longer contains {self.because!r}"
        if self.name is None:
            return None
        if not hasattr(self.load(), self.name):
            return f"megatron.core.{self.module} no longer has {self.name}"
        if not callable(self.replacement):
            return None
        given = inspect.signature(getattr(self.load(), self.name)).parameters
        known = inspect.signature(self.replacement).parameters
        if new := [name for name, parameter in given.items() if not _takes(known, parameter)]:
            return (
                f"megatron.core.{self.module}.{self.name} has parameters that megarl's does not know: {new}"
            )
        return None

    def apply(self, view: types.ModuleType) -> None:
        setattr(self.load(), self.name or "torch", self.replacement if self.name else view)


def _takes(known: Mapping[str, inspect.Parameter], given: inspect.Parameter) -> bool:
    kinds = {parameter.kind for parameter in known.values()}
    return given.name in known or {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} <= kinds


# -- The CPU view of torch ---------------------------------------------------------------------------------------


def _on_cpu(device: Any) -> Any:
    """A CUDA device in any of its spellings becomes the CPU; everything else passes."""
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return CPU
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


class _Stream:
    """A stream or an event on a device that computes in order: nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> _Stream:
        return event or _Stream()

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _cpu_cuda() -> types.ModuleType:
    """`torch.cuda` as megatron-core uses it, for a machine without CUDA."""
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(
        current_device=lambda: CPU,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        manual_seed=torch.manual_seed,
        random=types.SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state),
        Stream=_Stream,
        Event=_Stream,
        current_stream=_Stream,
        default_stream=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        is_available=lambda: False,
        __getattr__=lambda name: getattr(torch.cuda, name),
    )
    return cuda


def _cpu_torch() -> types.ModuleType:
    """torch, as an adapted module sees it."""
    view = types.ModuleType("torch")
    factories = (
        "tensor zeros ones empty full arange rand randn randint linspace as_tensor "
        "zeros_like ones_like empty_like full_like"
    )
    view.__dict__.update({name: _factory(getattr(torch, name)) for name in factories.split()})
    view.__dict__.update(cuda=_cpu_cuda(), __getattr__=lambda name: getattr(torch, name))
    return view


# -- Replaced functions ------------------------------------------------------------------------------------------


def _split_sizes_to_lists(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """On a GPU this copies split sizes to the host; gloo, too, wants them as integers."""
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _clip_by_total_norm(
    parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """The same scaling, without the assertion that gradients are CUDA tensors."""
    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient < 1.0:
        gradients = [getattr(p, attribute) for p in parameters if getattr(p, attribute, None) is not None]
        torch._foreach_mul_(gradients, coefficient)


def _gather_along_first_dim(
    input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """The same, also for unequal shares, which gloo's all_gather refuses (expert tensor parallelism has them)."""
    if group.size() == 1:
        return input_
    if output_split_sizes is None:
        output = input_.new_empty(len(input_) * group.size(), *input_.shape[1:])
        torch.distributed.all_gather_into_tensor(output, input_.contiguous(), group=group)
        return output
    sizes = [int(size) for size in output_split_sizes]
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_along_first_dim(
    input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """The same, also for unequal shares, which gloo's reduce_scatter refuses."""
    if group.size() == 1:
        return input_
    if input_split_sizes is None:
        output = input_.new_empty(len(input_) // group.size(), *input_.shape[1:])
        torch.distributed.reduce_scatter_tensor(output, input_.contiguous(), group=group)
        return output
    whole = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(whole, group=group)
    return whole.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()


_DEVICE = "torch.cuda.current_device()"

ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation("parallel_state", "torch.cuda.synchronize()"),
    Adaptation("utils", 'device="cuda"'),
    Adaptation("distributed.param_and_grad_buffer", _DEVICE),
    Adaptation("distributed.distributed_data_parallel", _DEVICE),
    Adaptation("optimizer.optimizer", "device='cuda'"),
    Adaptation("optimizer.distrib_optimizer", _DEVICE),
    Adaptation("optimizer.clip_grads", "device='cuda'"),
    Adaptation(
        "optimizer.optimizer",
        "clip_grad_by_total_norm_fp32(",
        "clip_grad_by_total_norm_fp32",
        _clip_by_total_norm,
    ),
    Adaptation("pipeline_parallel.schedules", 'torch.zeros([], dtype=torch.int, device="cuda")'),
    Adaptation("pipeline_parallel.p2p_communication", _DEVICE),
    Adaptation("tensor_parallel.random", "torch.cuda.get_rng_state()"),
    Adaptation("tensor_parallel.random", "_C._cuda_setRNGState", "_get_cuda_rng_state", _get_rng_state),
    Adaptation("tensor_parallel.random", "_C._cuda_setRNGState", "_set_cuda_rng_state", _set_rng_state),
    Adaptation("tensor_parallel.layers", _DEVICE),
    Adaptation("tensor_parallel.mappings", _DEVICE),
    Adaptation(
        "tensor_parallel.mappings",
        "list(torch.split(output, output_split_sizes, dim=0))",
        "_gather_along_first_dim",
        _gather_along_first_dim,
    ),
    Adaptation(
        "tensor_parallel.mappings",
        "list(torch.split(input_, input_split_sizes, dim=0))",
        "_reduce_scatter_along_first_dim",
        _reduce_scatter_along_first_dim,
    ),
    Adaptation("tensor_parallel.utils", _DEVICE),
    Adaptation("transformer.transformer_layer", _DEVICE),
    Adaptation("transformer.moe.router", _DEVICE),
    Adaptation("transformer.moe.token_dispatcher", "torch.cuda.Stream()"),
    Adaptation(
        "transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu(",
        "maybe_move_tensor_to_cpu",
        _split_sizes_to_lists,
    ),
    Adaptation(
        # without Transformer Engine the flag is True all the same, and the class is None
        "transformer.multi_latent_attention",
        "isinstance(self.linear_proj, TELinear)",
        "HAVE_TE",
        False,
    ),
    Adaptation("models.gpt.gpt_model", _DEVICE),
    Adaptation("models.common.embeddings.rope_utils", "pin_memory=True"),
    Adaptation("models.common.embeddings.rotary_pos_embedding", _DEVICE),
    Adaptation("models.common.embeddings.yarn_rotary_pos_embedding", _DEVICE),
    Adaptation("dist_checkpointing.exchange_utils", 'device="cuda"'),
    Adaptation("dist_checkpointing.strategies.fully_parallel", "torch.cuda.synchronize()"),
    Adaptation("dist_checkpointing.strategies.filesystem_async", "torch.cuda.synchronize()"),
    Adaptation("dist_checkpointing.strategies.state_dict_saver", _DEVICE),
)


def check() -> list[str]:
    """What no longer fits the installed megatron-core; empty when all is well."""
    return [problem for adaptation in ADAPTATIONS if (problem := adaptation.problem())]


def adapt() -> None:
    """Apply every adaptation to this process. Idempotent. Call before a model is built.

    Raises RuntimeError that lists each place where the installed megatron-core has moved on, and what to install.
    """
    if problems := check():
        raise versions.unknown(problems)
    view = _cpu_torch()
    for adaptation in ADAPTATIONS:
        adaptation.apply(view)
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # undefined without Transformer Engine, yet asked for
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    # Methods that no view can reach; on a machine without CUDA nobody else calls them.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


def name_as_cuda(parameters: Any) -> None:
    """Let `param.type()` answer as on CUDA, for the distributed optimizer, which sorts parameters by that name.

    Needed by megatron.core.optimizer.distrib_optimizer (`model_param.type() == 'torch.cuda.FloatTensor'`).
    """
    names = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
    for parameter in parameters:
        name = f"torch.cuda.{names[parameter.dtype]}Tensor"
        parameter.type = lambda name=name: name
