"""The tokenizer of a policy: text in, token ids out, with the chat template of its folder.

Prompts and responses are tokenized apart and joined as ids, in training on demonstrations as in sampling,
so that a demonstration has exactly the token boundary at which the engine starts to sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.packing import TokenSequence
from megarl.data.wording import Message, function_of, rendered
from megarl.errors import UserError
from megarl.settings import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME_STOPS = ("generation_config.json", "config.json")  # files that list what ends a response
_CLOSING_TAG = re.compile(r"</\w+>")  # as `</answer>`: it may stop a response, and is a part of it

REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # what templates call the thoughts before an answer
# Fields without which a message says something else: a template must know them.
SAID = (*REASONING, "tool_calls", "function_call")


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template. Make it by `load_tokenizer`.

    hf: the wrapped tokenizer. eos_token_id ends a response; stop_token_ids (eos first) holds every id that
    does, as generation_config.json and config.json list them. pad_token_id falls back to eos.
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        folder: Path,
        stop_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        """now: what a template that asks for the date is told; None = the clock."""
        if hf.eos_token_id is None:
            raise UserError(
                f"{folder}: the tokenizer has no EOS token. Set eos_token in its tokenizer_config.json."
            )
        self.hf = hf
        self.folder = folder
        self.template_options = dict(template_options or {})
        self._clock = {} if now is None else {"strftime_now": now.strftime}
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

    @cached_property
    def identity(self) -> str:
        """The same for tokenizers that write the same: of the vocabulary, the template and its options, not of the
        folder's name or of the date that a template writes."""
        what = [sorted(self.hf.get_vocab().items()), self.hf.chat_template, self.template_options]
        text = json.dumps([*what, self.stop_token_ids], sort_keys=True, default=str)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def describe_stops(self) -> str:
        """Return one sentence that names every token which ends a response."""
        known = [(self.hf.convert_ids_to_tokens(i), i) for i in self.stop_token_ids]
        names = [f"{token} ({i})" if token is not None else str(i) for token, i in known]
        return f"Responses end at {', '.join(names)}."

    def encode(self, text: str) -> np.ndarray:
        """Return the ids int32 [tokens] of the text as it is: nothing is added; special tokens in it are parsed."""
        return self.encode_texts([text])[0]

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

    def render_prompt(
        self, messages: Sequence[Message] | str, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt's text, up to where the assistant begins. A string is one user message.

        variables: what else the template gets for this prompt: tools, documents, its own options. Raises UserError if
        the messages don't fit the chat template, and where it does not know a field that they hold.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        self._check_known(messages, variables or {})
        return self._render(messages, variables or {}, add_generation_prompt=True)

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of many texts, by all cores. Raises UserError for a text that is not valid Unicode."""
        if not texts:
            return []
        for text in texts:
            if not text.isascii() and (half := re.search("[\ud800-\udfff]", text)):
                around = text[max(0, half.start() - 20) : half.start() + 20]
                raise UserError(f"half a character, which no tokenizer can read, in {around!a}")
        encoded = self.hf(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def unread_fields(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> set[str]:
        """Return the names of the messages' fields that the chat template does not mention."""
        names = {key for message in messages for key in message} - {"role", "content", "weight"}
        return {name for name in names if not self._knows(name, tools="tools" in (variables or {}))}

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> TokenSequence:
        """Encode a whole conversation; every assistant turn is learned, up to and with its EOS, and nothing else.

        A turn with `weight: 0` is not learned. The conversation is rendered once, as the model will meet it.
        variables: as in `render_prompt`. Raises UserError for one without a turn to learn, for a field that the
        template does not know, and where the template leaves out part of a turn (as some do with earlier thinking):
        to learn such a turn, give it as a conversation of its own, up to there.
        """
        return self.encode_chats([messages], [variables or {}])[0]

    def encode_chats(
        self, chats: Sequence[Sequence[Message]], variables: Sequence[Mapping[str, Any]] | None = None
    ) -> list[TokenSequence]:
        """`encode_chat` of many conversations, twice as fast."""
        split = [
            self._split(chat, given)
            for chat, given in zip(chats, variables or [{}] * len(chats), strict=True)
        ]
        encoded = iter(self.encode_texts([text for texts in split for text in texts]))
        sequences = []
        for texts in split:
            parts = [next(encoded) for _ in texts]
            parts[1::2] = [self._with_eos(part) for part in parts[1::2]]
            learned = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
            sequences.append(TokenSequence(np.concatenate(parts), learned))
        return sequences

    def _split(self, chat: Sequence[Message], variables: Mapping[str, Any]) -> list[str]:
        """Return a conversation as texts: what comes before a learned turn, and the turn, by turns."""
        turns = [i for i, m in enumerate(chat) if m.get("role") == "assistant"]
        if not any(chat[i].get("weight", 1) for i in turns):
            raise UserError("a conversation to learn from needs at least one assistant message of weight 1")
        self._check_known(chat, variables)
        whole = self._render(chat, variables, add_generation_prompt=False)
        texts, done = [], 0
        for i in turns:
            before = self._render(chat[:i], variables, add_generation_prompt=True) if i else ""
            kept, learned = whole.startswith(before), chat[i].get("weight", 1)
            if not learned and (not kept or len(before) >= done):
                continue
            end = self._turn_end(whole, len(before), chat[: i + 1], variables, last=i + 1 == len(chat))
            turn = whole[len(before) : end]
            # The turn before this one may seem to go on, where it ends in another token than the last turn does.
            if not kept or len(before) < done or not self._says(turn, chat[: i + 1], before, variables):
                raise UserError(
                    f"{self.folder}: the chat template rewrites message {i + 1} or what comes before it in the "
                    "conversation. Learn from the conversation up to that message, or give another chat_template."
                )
            texts += [whole[done : len(before)], turn]
            done = end
        return texts

    def _says(self, turn: str, chat: Sequence[Message], before: str, variables: Mapping[str, Any]) -> bool:
        """Whether a rendered turn holds all that its message, the chat's last one, says, spaces aside.

        before: the prompt, whose end may say the beginning for the assistant: `<think>`.
        """
        message = chat[-1]
        said = [self._unended(str(message.get("content") or "")), *(message.get(key) for key in REASONING)]
        said += [function_of(call).get("name") for call in message.get("tool_calls") or ()]
        told = ["".join(text.split()) for text in said if isinstance(text, str)]
        if all(text in "".join(turn.split()) for text in told):
            return True
        asked = self._render(chat[:-1], variables, add_generation_prompt=False) if chat[:-1] else ""
        opened = before.removeprefix(asked) if before.startswith(asked) else ""
        return all(text in "".join((opened + turn).split()) for text in told)

    def _turn_end(
        self, whole: str, start: int, turns: Sequence[Message], variables: Mapping[str, Any], *, last: bool
    ) -> int:
        """Return where the turn that begins at `start` ends: behind its stop token, or where the template leaves it."""
        stop = re.compile("|".join(map(re.escape, self._stops)))
        found = stop.search(whole, start)
        if last:
            return found.end() if found else len(whole)
        try:
            closed = self._render(turns, variables, add_generation_prompt=False)
        except UserError:  # some templates want a result behind every call
            if found is None:
                raise
            return found.end()
        if whole.startswith(closed):  # a stop token behind that is another turn's
            found = stop.search(whole, start, len(closed))
        return found.end() if found else len(closed)

    @cached_property
    def _stops(self) -> list[str]:
        """The texts of the tokens that end a response; the model's files may name ids beyond the tokenizer's."""
        tokens = self.hf.convert_ids_to_tokens(list(self.stop_token_ids))
        return [str(token) for token in tokens if token is not None]

    def _unended(self, text: str) -> str:
        """Return a text without the stop tokens that it ends with."""
        while (plain := text.rstrip()).endswith(tuple(self._stops)):
            text = next(plain.removesuffix(stop) for stop in self._stops if plain.endswith(stop))
        return text

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        ended = len(ids) and int(ids[-1]) in self.stop_token_ids
        return ids if ended else np.append(ids, np.int32(self.eos_token_id))

    def _template(self, *, tools: bool) -> str:
        """Return the text of the template, of several the one for prompts with tools, or without."""
        try:
            return str(self.hf.get_chat_template(None, [{}] if tools else None))
        except ValueError as error:
            raise UserError(
                f"{self.folder}: the tokenizer has no chat template. Add chat_template.jinja to the folder, "
                f"or set chat_template to a Jinja file. ({error})"
            ) from error

    def _knows(self, name: str, *, tools: bool = False) -> bool:
        """Whether the template mentions a name, or takes messages as a whole."""
        return bool(
            re.search(rf"\b{re.escape(name)}\b|\bmessages?\s*\|\s*tojson", self._template(tools=tools))
        )

    def _check_known(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
        """Raise UserError where the template does not mention what would change the text."""
        names = {key for message in messages for key in SAID if message.get(key)} | set(variables)
        lost = sorted(name for name in names if not self._knows(name, tools="tools" in variables))
        if lost:
            raise UserError(
                f"{self.folder}: the chat template does not know {', '.join(map(repr, lost))}, which would be lost: "
                "give another chat_template, or leave it out of the data."
            )

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Return the template's text of messages as it can take them, with one stop token where a text has its own."""

        def render(chat: Sequence[Message]) -> str:
            return self._apply(chat, variables, add_generation_prompt=add_generation_prompt)

        text, messages = rendered(messages, render)
        said = [str(m.get("content") or "") for m in messages if m.get("role") == "assistant"]
        if any(self._unended(content) != content for content in said):
            stop = "(?:" + "|".join(map(re.escape, self._stops)) + ")"
            if re.search(rf"{stop}\s*{stop}", text):
                text = render([self._ended_once(m) for m in messages])
        return text

    def _ended_once(self, message: Message) -> Message:
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, str):
            return message
        return {**message, "content": self._unended(content)}

    def _apply(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        self._template(tools=bool(variables.get("tools")))
        try:
            text = self.hf.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **{**self._clock, **self.template_options, **variables},
            )
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise UserError(f"{self.folder}: the chat template refuses the messages: {error}") from error
        return str(text)


def load_tokenizer(
    folder: str | Path,
    chat_template: str | Path | None = None,
    template_options: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    *,
    model: str | Path | None = None,
) -> ChatTokenizer:
    """Load the tokenizer of a Hugging Face folder; nothing is downloaded and no code of the folder is run.

    chat_template: a Jinja file to use instead of the folder's own. now: what a template that asks for the date is
    told; None = the clock. model: the folder of the policy, where it is another: the tokens at which its files say
    that a response ends do so, too. Raises UserError for a folder that is missing or holds no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = user_path(folder)
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
            hf.chat_template = user_path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{chat_template}: the chat template can't be read: {error}") from error
    folders = dict.fromkeys((folder, user_path(model or folder)))
    stops = [i for place in folders for name in NAME_STOPS for i in _stops(place / name)]
    return ChatTokenizer(hf, folder, stops, template_options, now)


def _stops(path: Path) -> list[int]:
    """Return the ids that a folder's file lists as ending a response."""
    if not path.is_file():
        return []
    try:
        stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object: {error}") from error
    listed = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if wrong := [i for i in listed if type(i) is not int or not 0 <= i < 2**31]:
        raise UserError(
            f"{path}: eos_token_id: {wrong[0]!r} is no token id; write a number, or a list of numbers"
        )
    return listed
