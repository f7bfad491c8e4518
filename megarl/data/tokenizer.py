"""The tokenizer of a policy: text in, token ids out, with the chat template of its folder.

Prompts and responses are tokenized apart and joined as ids, in training on demonstrations as in sampling,
so that a demonstration has exactly the token boundary at which the engine starts to sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.packing import TokenSequence
from megarl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOSING_TAG = re.compile(r"</\w+>")  # as `</answer>`: it may stop a response, and is a part of it

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": str}


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template. Make it by `load_tokenizer`.

    hf: the wrapped tokenizer. eos_token_id ends a response; stop_token_ids (eos first) holds every id that
    does, as the folder's generation_config.json lists them. pad_token_id falls back to eos.
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        folder: Path,
        stop_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if hf.eos_token_id is None:
            raise UserError(
                f"{folder}: the tokenizer has no EOS token. Set eos_token in its tokenizer_config.json."
            )
        self.hf = hf
        self.folder = folder
        self.template_options = dict(template_options or {})
        self.eos_token_id: int = int(hf.eos_token_id)
        self.pad_token_id: int = int(hf.pad_token_id) if hf.pad_token_id is not None else self.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((self.eos_token_id, *stop_token_ids)))
        self._framing = self._frame()
        self.vocab_size: int = max(hf.get_vocab().values()) + 1  # rows an embedding must have

    def _frame(self) -> frozenset[int]:
        """Return the special tokens that frame a response and are no part of its text."""
        special = {i for i, token in self.hf.added_tokens_decoder.items() if token.special}
        special.update(self.hf.all_special_ids)
        stops = {
            i
            for i in self.stop_token_ids[1:]
            if not _CLOSING_TAG.fullmatch(str(self.hf.convert_ids_to_tokens(i)))
        }
        return frozenset(special & {self.hf.bos_token_id, self.eos_token_id, self.hf.pad_token_id, *stops})

    def check_embedding(self, rows: int) -> None:
        """Raise UserError unless an embedding of this many rows holds every token id."""
        if self.vocab_size > rows:
            raise UserError(
                f"{self.folder}: the tokenizer has ids up to {self.vocab_size - 1}, the model's embedding "
                f"only {rows} rows. Use the tokenizer of this model, or set the model's vocab_size to "
                f"{self.vocab_size}."
            )

    def encode(self, text: str) -> np.ndarray:
        """Return the ids int32 [tokens] of the text as it is: nothing is added; special tokens in it are parsed."""
        return np.asarray(self.hf.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of a response; bytes that form no character become U+FFFD.

        Only the special tokens that frame it (BOS, EOS, padding, and what else stops it) are left out. All others are
        text, as `<think>` and `<tool_call>` are in many vocabularies: the same response has the same text, whether
        its tags are special tokens, other tokens, or several.
        """
        return str(
            self.hf.decode(
                [i for i in np.asarray(token_ids).tolist() if i not in self._framing],
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    def render_prompt(self, messages: Sequence[Message] | str) -> str:
        """Return the prompt's text, up to where the assistant begins. A string is one user message.

        Raises UserError if the messages don't fit the chat template.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._render(messages, add_generation_prompt=True)

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of many texts, by all cores."""
        if not texts:
            return []
        encoded = self.hf(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def encode_chat(self, messages: Sequence[Message]) -> TokenSequence:
        """Encode a whole conversation; every assistant turn is learned, up to and with its EOS, and nothing else.

        The conversation is rendered once, as the model will meet it. Raises UserError for one without an
        assistant turn, and where the template leaves out part of a turn (as some do with earlier thinking):
        to learn such a turn, give it as a conversation of its own, up to there.
        """
        return self.encode_chats([messages])[0]

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> list[TokenSequence]:
        """`encode_chat` of many conversations, twice as fast."""
        turns = [[i for i, m in enumerate(chat) if m.get("role") == "assistant"] for chat in chats]
        if not all(turns):
            raise UserError("a conversation to learn from needs at least one assistant message")
        wholes = self._render_all(chats, add_generation_prompt=False)
        asked = [chat[:i] for chat, own in zip(chats, turns, strict=True) for i in own if i]
        prompts = iter(self._render_all(asked, add_generation_prompt=True))
        texts = []  # what is asked and what is answered take turns
        for chat, own, whole in zip(chats, turns, wholes, strict=True):
            done = 0
            for i in own:
                before = next(prompts) if i else ""
                end = self._turn_end(whole, len(before), chat[: i + 1])
                turn = whole[len(before) : end]
                if not whole.startswith(before) or str(chat[i]["content"]).strip() not in turn:
                    raise UserError(
                        f"{self.folder}: the chat template rewrites message {i + 1} or what comes before it in the "
                        "conversation. Learn from the conversation up to that message, or give another chat_template."
                    )
                texts += [whole[done : len(before)], turn]
                done = end
        encoded = iter(self.encode_texts(texts))
        sequences = []
        for own in turns:
            parts = [part for _ in own for part in (next(encoded), self._with_eos(next(encoded)))]
            learned = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
            sequences.append(TokenSequence(np.concatenate(parts), learned))
        return sequences

    def _turn_end(self, whole: str, start: int, turns: Sequence[Message]) -> int:
        """Return where the turn that begins at `start` ends: behind its stop token, or where the template leaves it."""
        marks = [str(self.hf.convert_ids_to_tokens(i)) for i in self.stop_token_ids]
        ends = [at + len(mark) for mark in marks if (at := whole.find(mark, start)) >= 0]
        return min(ends) if ends else len(self._render(turns, add_generation_prompt=False))

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        ended = len(ids) and int(ids[-1]) in self.stop_token_ids
        return ids if ended else np.append(ids, np.int32(self.eos_token_id))

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return self._render_all([messages], add_generation_prompt=add_generation_prompt)[0]

    def _render_all(self, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool) -> list[str]:
        if not chats:
            return []
        if not self.hf.chat_template:
            raise UserError(
                f"{self.folder}: the tokenizer has no chat template. Add chat_template.jinja to the folder, "
                "or set chat_template to a Jinja file."
            )
        try:
            rendered = self.hf.apply_chat_template(
                [[dict(m) for m in chat] for chat in chats],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_options,
            )
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise UserError(f"{self.folder}: the chat template refuses the messages: {error}") from error
        return [str(text) for text in rendered]


def load_tokenizer(
    folder: str | Path,
    chat_template: str | Path | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> ChatTokenizer:
    """Load the tokenizer of a Hugging Face folder; nothing is downloaded and no code of the folder is run.

    chat_template: a Jinja file to use instead of the folder's own. Raises UserError for a folder that is
    missing or holds no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder. Give the folder of a Hugging Face tokenizer (tokenizer.json)."
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more
        raise UserError(f"{folder}: no tokenizer could be loaded from it: {error}") from error
    if chat_template is not None:
        try:
            hf.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{chat_template}: the chat template can't be read: {error}") from error
    stops = _generation_stops(folder / "generation_config.json")
    return ChatTokenizer(hf, folder, stops, template_options)


def _generation_stops(path: Path) -> list[int]:
    if not path.is_file():
        return []
    try:
        stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object: {error}") from error
    return [] if stops is None else [int(s) for s in (stops if isinstance(stops, list) else [stops])]
