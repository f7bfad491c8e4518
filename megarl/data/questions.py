"""A question before it meets a tokenizer: what is asked, who verifies, and the key it is recognised by."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.settings import Framing
from megarl.data.wording import Message


@dataclass(frozen=True)
class Question:
    """One question of a source.

    question_id: `"<source>/<row>"`, the same in every run.
    messages: the conversation up to where the assistant answers, framing included.
    variables: what else the row gives to the chat template: tools, documents, its own options.
    content: the bare question without framing; two questions of equal content (whitespace aside) are the same.
    verifier, ground_truth: as in `Prompt`.
    """

    question_id: str
    messages: tuple[Message, ...]
    content: str
    verifier: str
    ground_truth: Mapping[str, Any]
    variables: Mapping[str, Any] = field(default_factory=dict)


def content_key(text: str) -> bytes:
    """16 bytes by which a question is recognised: BLAKE2b of its text in Unicode NFC, whitespace aside."""
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def digest_of(*parts: Any) -> bytes:
    """16 bytes that are the same for equal JSON values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_held_out(key: bytes, fraction: float, salt: str = "") -> bool:
    """Return whether the split puts this key on the held-out side: a pure function of content, fraction and salt.

    Duplicates land on the same side, and growing the fraction only adds to the held-out side.
    """
    digest = hashlib.blake2b(key, digest_size=8, key=salt.encode()[:64]).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def frame(messages: Sequence[Message], framing: Framing) -> tuple[Message, ...]:
    """Put the system message, prefix and suffix around a question.

    A system message of the row itself stays and the framing's is not added.
    """
    framed = [dict(m) for m in messages]
    last_user = max((i for i, m in enumerate(framed) if m["role"] == "user"), default=None)
    if last_user is not None:
        framed[last_user]["content"] = framing.prefix + framed[last_user]["content"] + framing.suffix
    if framing.system is not None and not any(m["role"] == "system" for m in framed):
        framed.insert(0, {"role": "system", "content": framing.system})
    return tuple(framed)
