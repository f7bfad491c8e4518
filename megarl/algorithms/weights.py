"""The slot `weights`: how much each token counts, decided once on the global batch.

The policy loss is sum_t w_t * l_t. A weight depends only on counts, so the sum over any split of the batch
(micro-batches, replicas) is the whole batch's loss, and gradients are summed, never divided again. "Global
batch" is what one optimizer step learns from. `batches.add_token_weights` makes them once per optimizer step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.parts import find_part, part
from megarl.algorithms.recipe import Recipe
from megarl.algorithms.responses import Responses
from megarl.errors import UserError


class Totals(NamedTuple):
    """The counts that token weights are made of.

    counts: int64 [3], of the global batch: active tokens, responses with an active token, groups with one.
        Summed over replicas; a group lives on one replica, so nothing is counted twice.
    response_tokens: int64 [responses], active tokens of each.
    group_tokens: int64 [responses], active tokens of each response's whole group in this optimizer step.
    max_length: the generation budget in tokens, where it is known.
    """

    counts: Tensor
    response_tokens: Tensor
    group_tokens: Tensor
    max_length: int | None = None

    @property
    def tokens(self) -> Tensor:
        return self.counts[0]

    @property
    def responses(self) -> Tensor:
        return self.counts[1]

    @property
    def groups(self) -> Tensor:
        return self.counts[2]

    def select(self, rows: Tensor) -> Totals:
        """Return the same totals for some of the responses (a micro-batch's). rows: int64 [some responses]."""
        return self._replace(response_tokens=self.response_tokens[rows], group_tokens=self.group_tokens[rows])


@part("weights", formula="w_t = 1 / (active tokens of the batch)", meaning="every token weighs the same")
def token_mean(totals: Totals) -> Tensor:
    return totals.tokens


@part(
    "weights",
    formula="w_t = 1 / (groups * active tokens of the group)",
    meaning="every prompt weighs the same, and inside it every token",
)
def group_token_mean(totals: Totals) -> Tensor:
    return totals.groups * totals.group_tokens


@part(
    "weights",
    formula="w_t = 1 / (responses * |y|)",
    meaning="every response weighs the same",
    per_response=True,
)
def sequence_mean(totals: Totals) -> Tensor:
    return totals.responses * totals.response_tokens


@part(
    "weights",
    formula="w_t = 1 / (responses * L_max), L_max = the generation budget",
    meaning="every token weighs the same in every batch",
)
def constant(totals: Totals) -> Tensor:
    if not totals.max_length:
        raise UserError(
            f"weights: constant divides by the generation budget; max_length is {totals.max_length!r}"
        )
    return totals.responses * totals.max_length


def local_totals(*, lengths: Tensor, group_ids: Tensor, max_length: int | None = None) -> Totals:
    """Totals of the responses that this replica brings to one optimizer step, ready to be summed over replicas.

    lengths: int [responses], active tokens of each. group_ids: int [responses], any numbers.
    A response without active tokens counts neither as a response nor towards its group. Raises ValueError for
    two shapes.
    """
    if group_ids.shape != lengths.shape:
        raise ValueError(f"group_ids has shape {list(group_ids.shape)}, lengths {list(lengths.shape)}")
    lengths = lengths.long()
    _, group = torch.unique(group_ids, return_inverse=True)
    per_group = torch.zeros_like(lengths).index_add(0, group, lengths)
    counts = torch.stack([lengths.sum(), (lengths > 0).sum(), (per_group > 0).sum()])
    return Totals(counts, lengths, per_group[group], max_length)


def token_weights(mode: str | Recipe, responses: Responses, totals: Totals) -> Tensor:
    """float32 [tokens]: the weight of each token, 0 where masked and where no token is active.

    mode: a recipe, or the name of a part without settings (token_mean, group_token_mean, sequence_mean,
    constant). totals: the global counts, and the tokens of these responses. Raises UserError for an unknown mode,
    and for `constant` without a max_length.
    """
    if isinstance(mode, Recipe):
        denominator = mode.use("weights")(totals)
    else:
        chosen = find_part("weights", mode)
        if chosen.settings:
            raise ValueError(f"weights {mode!r} have settings: pass the recipe instead of their name")
        denominator = chosen(totals)
    denominator = denominator.double().expand(len(responses.active))
    per_response = torch.where(denominator > 0, 1.0 / denominator, 0.0)
    return responses.clean(responses.spread(per_response), "weights")
