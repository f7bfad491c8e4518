"""Which megatron-core megarl runs on, and what differs between those versions outside `cpu.py`.

Nothing here compares version numbers: each difference is looked for in the installed package.

| what differs | probe | what megarl does |
|---|---|---|
| places that assume CUDA | `cpu.ADAPTATIONS`, each with the line that needs it | adapts them on a CPU (`cpu.adapt`) |
| the import needs triton, undeclared | `imports_triton` | asks for it (`require_triton`) |
| a norm before whole latent queries | who calls `_resolve_qk_norm_config` | none (`parts.StockLatentAttention`) |
| whose tokens an auxiliary loss is multiplied by | `router_switch` | switches that off (`auxiliary.take_over`) |
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from megarl.errors import UserError

SUPPORTED = (
    "megatron-core>=0.16.1,<=0.19.2"  # what the tests pass on (launch/test_megatron.sh); as in pyproject.toml
)


def installed() -> str:
    """Return the installed version, for a message."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def unknown(problems: list[str]) -> RuntimeError:
    """Return the error for a megatron-core that differs from all that megarl knows: what differs, what to install."""
    listed = "".join(f"\n  {problem}" for problem in problems)
    return RuntimeError(
        f"megarl's adaptations do not fit megatron-core {installed()}:{listed}\n"
        f"Install a version that megarl is tested with: pip install '{SUPPORTED}'"
    )


def imports_triton(core: Path) -> bool:
    """Return whether importing the megatron-core in this folder imports triton: its pipeline schedules import a module
    with kernels for it."""
    kernels = (core / "transformer" / "moe").rglob("paged_stash.py")
    return any(re.search("^import triton", file.read_text(), re.MULTILINE) for file in kernels)


def require_triton(core: Path | None = None) -> None:
    """Raise UserError where megatron-core, in this folder or as installed, imports triton and it is not there."""
    if importlib.util.find_spec("triton") is not None:
        return
    if core is None:
        spec = importlib.util.find_spec("megatron.core")
        if spec is None or spec.origin is None:
            return  # its import says so
        core = Path(spec.origin).parent
    if imports_triton(core):
        raise UserError(
            f"megatron-core {installed()} imports triton, which is not installed (CPU builds of torch lack it): "
            "pip install triton (no GPU is needed to import it), or go back to a megatron-core that does without it: "
            "pip install megatron-core==0.16.1"
        )


def router_switch(router: Any) -> str:
    """Return the name of the attribute by which a router multiplies its auxiliary losses by tokens, or does not.

    Raises RuntimeError for one that has none.
    """
    name = "calculate_per_token_loss"
    if not hasattr(router, name):
        raise unknown([f"megatron.core.transformer.moe.router.{type(router).__name__} no longer has {name}"])
    return name
