"""What `tests.forks` forks its processes from has imported this: torch, megatron-core, transformers, all of megarl."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil

import megarl

LAZY = (  # imported by megarl in the midst of a run; none of them starts a thread
    "pytest",
    "tests.forks",
    "tests.ranks",
    "reasoning_gym",
    "torch._dynamo",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)

for _name in (*LAZY, *(module.name for module in pkgutil.walk_packages(megarl.__path__, "megarl."))):
    if not _name.endswith("__main__"):
        importlib.import_module(_name)

threads = len(os.listdir("/proc/self/task"))
gc.collect()
gc.freeze()  # the forks share these pages; a collection would copy them
