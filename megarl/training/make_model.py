"""A policy made on the spot: an HF checkpoint of random weights from a few config fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.data.tokenizer import ChatTokenizer
from megarl.errors import UserError, did_you_mean
from megarl.monitor.files import writing

READ_IF_SET = ("head_dim",)  # fields that a model class reads although its config class does not declare them


def made_config(fields: Mapping[str, Any], **defaults: Any) -> Any:
    """The transformers config of these fields over `defaults`, the architecture of a language model named in it.

    Raises UserError for an unknown model type, an unknown field or a shape transformers refuses.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = {**fields}
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"model.make.model_type: unknown model type {model_type!r}.{did_you_mean(model_type, CONFIG_MAPPING_NAMES)}"
        )
    default = AutoConfig.for_model(model_type)
    for name in values:
        if not hasattr(default, name) and name not in READ_IF_SET:
            raise UserError(
                f"model.make.{name}: {model_type} has no such field.{did_you_mean(name, vars(default))}"
            )
    try:
        config = AutoConfig.for_model(model_type, **{**defaults, **values})
    except (ValueError, TypeError, RuntimeError) as error:
        raise _refused(error) from error
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    config.architectures = [architecture] if architecture else []
    return config


def _refused(error: Exception) -> UserError:
    return UserError(f"model.make: transformers refuses this shape: {error}")


def make_checkpoint(fields: Mapping[str, Any], tokenizer: ChatTokenizer, folder: Path, *, seed: int) -> None:
    """Write `folder`: config.json, weights drawn from `seed`, tokenizer files.

    The vocabulary is the tokenizer's unless `fields` say otherwise. Raises UserError as `made_config` does, and where
    the folder cannot be written.
    """
    from transformers import AutoModelForCausalLM

    config = made_config(
        fields,
        vocab_size=tokenizer.hf.backend_tokenizer.get_vocab_size(),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.hf.pad_token_id,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _refused(error) from error
    with writing(folder):
        model.save_pretrained(folder)
        tokenizer.hf.save_pretrained(folder)
