"""How a managed server is started: its command line and its environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from megarl.rollout.declaration import EngineContext
from megarl.rollout.sglang.settings import SGLangSettings

# SGLang keeps back up to 7 tokens of its context length; it is told more so that all of ours can be used.
SPARE_CONTEXT = 8
OVERRIDES = "json-model-override-args"


def dtype_of(settings: SGLangSettings, context: EngineContext) -> str:
    """Return the servers' dtype as torch names it."""
    return str(context.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype


def server_command(
    settings: SGLangSettings, context: EngineContext, number: int, told: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the command line that starts server `number`, without host and port.

    told: what its config must say beside config.json (`FusedLayout.told`). Raises UserError if SGLang's environment is
    missing.
    """
    length = context.architecture.max_positions + SPARE_CONTEXT
    tokens = settings.max_total_tokens
    if tokens is None and context.device == "cpu":
        tokens = settings.max_running_requests * length
    options: dict[str, object] = {
        "--model-path": context.model_path,
        "--dtype": dtype_of(settings, context),
        "--context-length": length,
        "--max-running-requests": settings.max_running_requests,
        "--tp-size": settings.tensor_parallel,
        "--random-seed": context.seed + number,
        "--weight-version": 0,
        "--sampling-defaults": "openai",
        "--log-level-http": "warning",
        "--decode-log-interval": 1000,
    }
    if tokens is not None:
        options["--max-total-tokens"] = tokens
    if context.device == "cuda":
        options["--base-gpu-id"] = number * settings.tensor_parallel
    flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
    if context.architecture.moe_layers:
        flags.append("--enable-return-routed-experts")
    if "moe_shared_expert_intermediate_size" in context.architecture.transformer:
        flags.append("--disable-shared-experts-fusion")  # it would be one more expert, in weights and routes
    if settings.pause_mode == "in_place":
        flags.append("--disable-radix-cache")  # prefixes of old weights would be found in it
    arguments = {name.replace("_", "-"): value for name, value in settings.args.items()}
    if told:
        arguments[OVERRIDES] = json.dumps({**told, **json.loads(arguments.get(OVERRIDES, "{}"))})
    for name, value in arguments.items():
        flags += [f"--{name}", *([] if value is True else [str(value)])]
    module = "sglang_cpu" if context.device == "cpu" else "sglang.launch_server"
    words = [str(word) for option in options.items() for word in option]
    return [str(settings.find_python()), "-m", module, *words, *flags]


def server_environment(settings: SGLangSettings, context: EngineContext) -> dict[str, str]:
    """Return the environment variables that a server gets beside the inherited ones."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # SPARE_CONTEXT, never used by a token
    }
    if context.device == "cpu" and settings.tensor_parallel > 1:
        cores = os.cpu_count() or 1
        bindings = "|".join(str(rank % cores) for rank in range(settings.tensor_parallel))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = bindings
    return variables
