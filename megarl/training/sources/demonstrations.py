"""Demonstrations for supervised fine-tuning: one mini-batch a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.data.demonstrations import Demonstrations
from megarl.errors import UserError
from megarl.megatron.policy import Policy
from megarl.records import Batch
from megarl.training.minibatches import pack_sequences


@dataclass(frozen=True)
class DemonstrationBatches:
    """Packed demonstrations. batch_size: of a step, over all replicas. The step's number says which they are, so there
    is no position to save."""

    demonstrations: Demonstrations
    policy: Policy
    batch_size: int
    token_budget: int

    def next(self, step: int) -> list[Batch]:
        groups = self.policy.groups
        share = self.batch_size // groups.replica_count
        sequences = self.demonstrations.batch(step, share, groups.replica_index, groups.replica_count)
        return [pack_sequences(sequences, self.policy, self.token_budget)]

    def state_dict(self) -> dict[str, Any]:
        return {"demonstrations": self.demonstrations.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        then, now = state["demonstrations"], self.demonstrations.identity
        if then != now:
            raise UserError(
                f"its cold start learned from other demonstrations ({then}) than those of now ({now}): restore them, "
                "or start a new run with another name"
            )
