"""From a Hugging Face folder or configuration to a model that the engine can run, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megarl.errors import UserError
from megarl.rollout.embedded.model import HFModel
from megarl.rollout.embedded.qwen3 import Qwen3


def load(source: Path | str | PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> HFModel:
    """Load a folder with its weights, or a configuration (weights are then noise until they are set).

    Raises UserError for a folder without a model, an architecture transformers doesn't know, or one that the
    engine would get wrong.
    """
    if not isinstance(source, PreTrainedConfig) and not (Path(source) / "config.json").is_file():
        raise UserError(f"{source}: no Hugging Face model here (config.json is missing)")
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    try:
        if isinstance(source, PreTrainedConfig):
            refuse_unsupported(source)
            network = AutoModelForCausalLM.from_config(source, **options)
        else:
            refuse_unsupported(AutoConfig.from_pretrained(str(source)))
            network = AutoModelForCausalLM.from_pretrained(str(source), local_files_only=True, **options)
    except (ValueError, OSError) as error:
        raise UserError(f"{source}: transformers cannot load this model: {error}") from error
    network = network.to(device)
    return Qwen3(network) if Qwen3.fits(network) else HFModel(network)


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Refuse a sliding window and linear attention: the cache holds every token of every layer."""
    others = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if others:
        raise UserError(
            f"the embedded engine runs full attention only; {config.model_type} has "
            f"{', '.join(sorted(others))} layers. Use the sglang engine."
        )
