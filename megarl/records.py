"""The records that cross a seam between rooms. Frozen, and validated when made.

One step, as data: `Prompt` -> engine -> `Sample` -> verifier -> `Group` -> advantages -> `Batch` of packed
`MicroBatch`es -> trainer.

Positions. In a packed micro-batch every per-token vector is indexed by *input position*: entry `t` belongs to
the prediction of token `t + 1` of the same sequence. The last position of a sequence predicts nothing, so its
mask is never set. A route trace has one row for each input position but the last, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One question with what its verifier needs.

    prompt_id: unique in its source and the same in every run (`"<source>/<row>"`).
    token_ids: int32 [prompt_tokens], after the chat template; what the engine continues.
    text: the rendered prompt, for people.
    verifier: a name in the reward registry.
    ground_truth: what the verifier compares with (answer, unit tests, task metadata); JSON-able.
    """

    prompt_id: str
    token_ids: np.ndarray
    text: str
    verifier: str
    ground_truth: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError(f"prompt {self.prompt_id!r}: token_ids must be a non-empty vector")


@dataclass(frozen=True)
class WeightSpan:
    """Response tokens `[start, end)` were sampled by the weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """Experts chosen while a sample was generated, or recorded by the trainer.

    experts: smallest unsigned integer type that holds the expert count, [tokens - 1, moe_layers, top_k];
        tokens = prompt + response; MoE layers only, in model order, dense layers never appear.
    spans: the weight versions that made the rows, as response-token spans (see `Sample.spans`).
    checksum: crc32 of the experts' bytes, made where the trace was made.
    """

    experts: np.ndarray
    spans: tuple[WeightSpan, ...]
    checksum: int


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to a prompt.

    response_ids: int32 [response_tokens], as sampled, never re-tokenized; ends with the EOS token if it stopped.
    logprobs: float32 [response_tokens], the engine's, at the sampling temperature.
    loss_mask: bool [response_tokens]; False for tokens the policy didn't sample (tool output) or must not learn.
    spans: contiguous weight-version spans that cover the response.
    routes: the engine's experts, if it was asked for them.
    text: the decoded response without special tokens.
    reward: None = unscored (verifier failed or timed out), which is never the same as 0.
    reward_parts: each verifier's own score, by name; None where that part could not be scored.
    unscored_reason: why `reward` is None.
    """

    prompt: Prompt
    sample_id: str
    response_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    finish_reason: FinishReason
    spans: tuple[WeightSpan, ...]
    routes: RouteTrace | None = None
    text: str = ""
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    unscored_reason: str | None = None

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        for name, dtype in (("response_ids", np.int32), ("logprobs", np.float32), ("loss_mask", np.bool_)):
            value = np.asarray(getattr(self, name), dtype=dtype)
            if value.shape != (n,):
                raise ValueError(
                    f"sample {self.sample_id!r}: {name} has shape {value.shape}, expected ({n},)"
                )
            object.__setattr__(self, name, value)
        end = 0
        for span in self.spans:
            if span.start != end or span.end < span.start:
                raise ValueError(f"sample {self.sample_id!r}: weight spans {self.spans} are not contiguous")
            end = span.end
        if end != n:
            raise ValueError(f"sample {self.sample_id!r}: weight spans end at {end}, the response at {n}")
        if self.routes is not None and len(self.routes.experts) != len(self.prompt.token_ids) + n - 1:
            raise ValueError(
                f"sample {self.sample_id!r}: {len(self.routes.experts)} route rows for "
                f"{len(self.prompt.token_ids)} prompt and {n} response tokens (expected one less than their sum)"
            )

    @property
    def tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def active_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, eq=False)
class Group:
    """The responses to one prompt; `dropped` says why the group is left out of training (None: it is kept).

    greedy_reward: of the greedy response to the prompt, where the recipe compares with it.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    dropped: str | None = None
    greedy_reward: float | None = None

    def __post_init__(self) -> None:
        for sample in self.samples:
            if sample.prompt.prompt_id != self.prompt.prompt_id:
                raise ValueError(
                    f"sample {sample.sample_id!r} answers {sample.prompt.prompt_id!r}, "
                    f"its group is of {self.prompt.prompt_id!r}"
                )


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some sequences packed end to end; every [tokens] vector is by input position (see the module docstring).

    token_ids, position_ids, labels: int64 [tokens]; positions start at 0 in each sequence.
    mask: bool [tokens], the prediction at this position is trained on.
    cu_seqlens: int32 [sequences + 1].
    rows: int64 [sequences], each sequence's index among its batch's responses.
    columns: further per-token quantities by name, [tokens, ...] each: "engine_logprobs", "old_logprobs",
        "ref_logprobs", "values", "advantages", "returns", "weights". What belongs to a token travels with it.
    routes: the experts to replay, or to compare with (see `megarl.routing.replay.Routes`); None = there are none.
    A micro-batch without sequences is a filler that keeps replicas in step; it carries one padding token.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    routes: Any = None

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        for name, column in self.columns.items():
            if len(column) != tokens:
                raise ValueError(f"micro-batch: column {name!r} has {len(column)} rows, not {tokens}")
        for name in ("position_ids", "labels", "mask"):
            if getattr(self, name).shape != (tokens,):
                raise ValueError(
                    f"micro-batch: {name} has shape {tuple(getattr(self, name).shape)}, not ({tokens},)"
                )
        if int(self.cu_seqlens[-1]) != tokens:
            raise ValueError(
                f"micro-batch: cu_seqlens end at {int(self.cu_seqlens[-1])}, the tokens at {tokens}"
            )

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def with_columns(self, **columns: torch.Tensor) -> MicroBatch:
        """Return the same micro-batch with these columns added, or exchanged."""
        return replace(self, columns={**self.columns, **columns})

    def with_routes(self, routes: Any) -> MicroBatch:
        """Return the same micro-batch with these routes."""
        return replace(self, routes=routes)


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimizer step's data on one data-parallel replica.

    samples: the replica's responses; row i of every [responses] tensor belongs to samples[i]. Empty where nothing was
        sampled (demonstrations).
    rewards, greedy_rewards: float32 [responses], the latter of the greedy response to the same prompt; NaN = unscored
        or not asked for.
    group_ids: int64 [responses], unique over the rollout.
    micro_batches: every response in exactly one of them.
    active_tokens: tokens that are trained on in the global batch, over all replicas; None until they are counted.
    """

    samples: tuple[Sample, ...]
    rewards: torch.Tensor
    greedy_rewards: torch.Tensor
    group_ids: torch.Tensor
    micro_batches: tuple[MicroBatch, ...]
    active_tokens: int | None = None

    def __post_init__(self) -> None:
        responses = len(self.group_ids)
        rows = sorted(row for m in self.micro_batches for row in m.rows.tolist())
        if rows != list(range(responses)):
            raise ValueError(f"batch: {responses} responses, but the micro-batches hold rows {rows}")
        if self.samples and len(self.samples) != responses:
            raise ValueError(f"batch: {len(self.samples)} samples, but {responses} group ids")
        for name in ("rewards", "greedy_rewards"):
            if getattr(self, name).shape != (responses,):
                raise ValueError(f"batch: {name} has shape {tuple(getattr(self, name).shape)}")

    @classmethod
    def of_sequences(cls, micro_batches: tuple[MicroBatch, ...]) -> Batch:
        """Make a batch of sequences that nothing scored, each a group of its own."""
        group_ids = torch.arange(sum(len(m.rows) for m in micro_batches))
        nothing = torch.full((len(group_ids),), torch.nan)
        return cls((), nothing, nothing, group_ids, micro_batches)

    def with_micro_batches(self, micro_batches: Iterable[MicroBatch]) -> Batch:
        """Return the same batch with these micro-batches in place of its own, one for one."""
        return replace(self, micro_batches=tuple(micro_batches))
