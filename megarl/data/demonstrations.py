"""Demonstrations for a cold start: from files, or made on the spot, where some answer at once and some show their
work first. That mixture gives reinforcement learning something to discover: that working it out pays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megarl.data.files import open_conversations
from megarl.data.packing import TokenSequence
from megarl.data.settings import DemonstrationSettings
from megarl.data.tokenizer import ChatTokenizer
from megarl.errors import UserError
from megarl.records import Prompt

ANSWER = "Answer:"
DEMONSTRATED = ("chain_sum",)


def worked_chain(expression: str) -> str:
    """A sum worked out from the left, with the running total after every term.

    >>> worked_chain("4 - 1 - 7 + 12")
    '4-1=3-7=-4+12=8'
    """
    total, *rest = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    value, text = int(total), total
    for term in rest:
        value += int(term)
        text += f"{term}={value}"
    return text


def shows_work(response: str) -> bool:
    """Whether a response says anything before its answer."""
    return bool(response.split(ANSWER)[0].strip())


class Demonstrations:
    """Answers to chain_sum prompts; `worked_share` of them show their work, after one of `openings`, all chosen by a
    hash of the prompt."""

    identity = "made on the spot"

    def __init__(
        self, tokenizer: ChatTokenizer, *, worked_share: float, openings: Sequence[str] = ("",), seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.worked_share = worked_share
        self.openings = openings
        self.seed = seed

    def response(self, prompt: Prompt) -> str:
        """The text to learn. Raises UserError for a task without demonstrations, naming it."""
        task = prompt.ground_truth.get("dataset")
        if task not in DEMONSTRATED:
            raise UserError(
                f"prompt {prompt.prompt_id!r}: there are no demonstrations for task {task!r}, only for "
                f"{', '.join(DEMONSTRATED)}: set sft.steps=0 or use that task"
            )
        entry = prompt.ground_truth["entry"]
        answer = f"{ANSWER} {entry['answer']}"
        digest = hashlib.blake2b(f"{self.seed}/{prompt.prompt_id}".encode(), digest_size=8).digest()
        draw = int.from_bytes(digest, "big")
        if draw >= self.worked_share * 2**64:
            return answer
        opening = self.openings[draw % len(self.openings)]
        return f"{opening}{worked_chain(entry['metadata']['expression'])}\n{answer}"

    def sequence(self, prompt: Prompt) -> TokenSequence:
        """Prompt and demonstrated response, EOS included; the response is learned."""
        return self.tokenizer.encode_demonstration(prompt.token_ids, self.response(prompt))


class FileDemonstrations:
    """Conversations of a file in an order that depends on nothing but the seed: step n's batch is the same after a
    restart and for any number of replicas, and every row is met once in each epoch.
    """

    def __init__(
        self, settings: DemonstrationSettings, tokenizer: ChatTokenizer, *, seed: int, max_tokens: int
    ) -> None:
        """max_tokens: the model's context. Raises UserError for a file that cannot be learned from."""
        most = min(settings.max_tokens or max_tokens, max_tokens)
        bounded = settings.model_copy(update={"max_tokens": most})
        self.sequences, self.tally = open_conversations(bounded, tokenizer)
        self.path = settings.path
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @cached_property
    def identity(self) -> str:
        """What says whether two files teach the same, in the same order of rows."""
        digest = hashlib.blake2b(digest_size=16)
        for sequence in self.sequences:
            for part in (sequence.token_ids, sequence.loss_mask):
                digest.update(part.tobytes())
        return f"{len(self.sequences)} conversations {digest.hexdigest()}"

    def batch(self, step: int, share: int, replica: int = 0, replicas: int = 1) -> list[TokenSequence]:
        """This replica's `share` of the sequences of step `step`, counted from 1."""
        first = ((step - 1) * replicas + replica) * share
        return [self._at(position) for position in range(first, first + share)]

    def _at(self, position: int) -> TokenSequence:
        epoch, place = divmod(position, len(self.sequences))
        if epoch not in self._orders:
            digest = hashlib.blake2b(f"{self._seed}/{epoch}".encode(), digest_size=16).digest()
            # RandomState, not Generator: its streams are frozen, so a resume survives an upgrade of numpy.
            order = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(len(self.sequences))
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self.sequences[self._orders[epoch][place]]
