"""Demonstrations for supervised fine-tuning: one mini-batch a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.data.demonstrations import Demonstrations, FileDemonstrations
from megarl.data.stream import PromptStream
from megarl.errors import UserError
from megarl.megatron.policy import Policy
from megarl.records import Batch
from megarl.training.minibatches import pack_sequences


@dataclass
class DemonstrationBatches:
    """Packed demonstrations. batch_size: of a step, over all replicas."""

    demonstrations: Demonstrations | FileDemonstrations
    prompt_stream: PromptStream
    policy: Policy
    batch_size: int
    token_budget: int

    def next(self, step: int) -> list[Batch]:
        groups = self.policy.groups
        share = self.batch_size // groups.replica_count
        if isinstance(self.demonstrations, FileDemonstrations):
            sequences = self.demonstrations.batch(step, share, groups.replica_index, groups.replica_count)
        else:
            sequences = [self.demonstrations.sequence(prompt) for prompt in self.prompt_stream.next(share)]
        return [pack_sequences(sequences, self.policy, self.token_budget)]

    def state_dict(self) -> dict[str, Any]:
        return {"demonstrations": self.demonstrations.identity, "stream": self.prompt_stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        then, now = state["demonstrations"], self.demonstrations.identity
        if then != now:
            raise UserError(
                f"its cold start learned from other demonstrations ({then}) than those of now ({now}): restore them, "
                "or start a new run with another name"
            )
        self.prompt_stream.load_state_dict(state["stream"])
