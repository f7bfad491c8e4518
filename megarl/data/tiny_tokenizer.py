"""A tiny byte-level tokenizer for a tiny policy, built from the questions of the tasks it is to solve.

Every byte is a token, so any text can be written; every digit is a token of its own, so that numbers of all
lengths are spelled the same way; the phrases of the tasks' questions are learned whole, words run together, so that
prompts are short.
The same tasks give the same files, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megarl.data.tokenizer import ChatTokenizer, load_tokenizer
from megarl.errors import UserError

PAD, TURN_START, TURN_END = "<pad>", "<|im_start|>", "<|im_end|>"
LEAST_VOCAB = 3 + 256

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


def build_tokenizer(folder: str | Path, texts: Iterable[str], vocab_size: int = 384) -> ChatTokenizer:
    """Train a byte-level BPE on the texts, save it to the folder and load it from there.

    vocab_size: the most entries (3 special tokens, 256 bytes, the rest merges; fewer if the texts hold
    fewer words). Special tokens: <pad> 0, <|im_start|> 1, <|im_end|> 2 (EOS). Raises UserError for a
    vocabulary under 259.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < LEAST_VOCAB:
        raise UserError(
            f"vocab_size is {vocab_size}: 3 special tokens and 256 bytes need at least {LEAST_VOCAB}."
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    policy = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([part for text in texts for part in ("user\n", text, "assistant\n")], policy)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    fast.chat_template = CHAT_TEMPLATE
    Path(folder).mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(str(folder))
    return load_tokenizer(folder)
