"""Demonstrations for a cold start: conversations in files."""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from megarl.data.files import open_conversations
from megarl.data.packing import TokenSequence
from megarl.data.settings import DemonstrationSettings
from megarl.data.stream import frozen_permutation
from megarl.data.tokenizer import ChatTokenizer


class Demonstrations:
    """Conversations of a file in an order that depends on nothing but the settings: step n's batch is the same after a
    restart and for any number of replicas, and every row is met once in each epoch.
    """

    def __init__(self, settings: DemonstrationSettings, tokenizer: ChatTokenizer, *, max_tokens: int) -> None:
        """max_tokens: the model's context. Raises UserError for a file that cannot be learned from."""
        most = min(settings.max_tokens or max_tokens, max_tokens)
        bounded = settings.model_copy(update={"max_tokens": most})
        self.sequences, self.tally = open_conversations(bounded, tokenizer)
        self.settings, self._tokenizer = settings, tokenizer
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @cached_property
    def identity(self) -> str:
        """The same for two cold starts that learn the same rows in the same order by the same template and tokenizer,
        whatever date the template writes."""
        order = f"shuffled by seed {self.settings.seed}" if self.settings.shuffle else "in their own order"
        rows = f"{len(self.sequences)} conversations {self.tally.digest.hexdigest()}"
        return f"{rows} {order}, chat template and tokenizer {self._tokenizer.identity}"

    def batch(self, step: int, share: int, replica: int = 0, replicas: int = 1) -> list[TokenSequence]:
        """Return this replica's `share` of the sequences of step `step`, counted from 1."""
        first = ((step - 1) * replicas + replica) * share
        return [self._at(position) for position in range(first, first + share)]

    def _at(self, position: int) -> TokenSequence:
        epoch, place = divmod(position, len(self.sequences))
        return self.sequences[self._order(epoch)[place] if self.settings.shuffle else place]

    def _shuffled(self, epoch: int) -> np.ndarray:
        return frozen_permutation(f"{self.settings.seed}/{epoch}", len(self.sequences))
