"""Tiny random Hugging Face checkpoints that every test may build: real architectures, under a megabyte.

Deterministic: the same arguments give the same bytes. The weights are drawn wider than an initialisation
would be, norms included, so that distributions are peaked, routers disagree and a mistaken weight map shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from examples.quickstart.make import QUICKSTART, make_files
from megarl.config.load import load_config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
VOCABULARY = 264  # 4 special tokens, 256 bytes, 4 rows that no token uses

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
MOE_SHAPE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 32,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, Qwen's special tokens, a ChatML template. EOS is `<|im_end|>` (id 2)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def tiny_qwen3_moe(
    path: Path | str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A Qwen3-MoE checkpoint folder with tokenizer: 3 layers, 8 experts, top-2. Overrides: config fields."""
    config = Qwen3MoeConfig(**{**SHAPE, **MOE_SHAPE, **overrides})
    return _save(Qwen3MoeForCausalLM(config), Path(path), seed, dtype)


def tiny_qwen3(
    path: Path | str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A dense Qwen3 checkpoint folder with tokenizer, 3 layers. Overrides: config fields."""
    return _save(Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **overrides})), Path(path), seed, dtype)


def small_quickstart(folder: Path) -> Path:
    """Make the files of a small quickstart in `folder`; returns its configuration."""
    config = folder / "quickstart.yaml"
    folder.mkdir(parents=True)
    config.write_text(
        f"defaults: [{QUICKSTART}]\nmodel: {{path: {folder}/model}}\n"
        f"sft: {{demonstrations: {{path: {folder}/demonstrations.jsonl}}}}\n"
    )
    make_files(load_config(config, ["sft.steps=1"]), SMALL, folder)
    return config


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter from `seed`, in the order of the model's own parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))  # norms are near 1
            else:
                parameter.copy_(noise * (0.3 if "lm_head" in name else 0.15))


def _save(model: Any, path: Path, seed: int, dtype: torch.dtype) -> Path:
    randomize(model, seed)
    model.to(dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
