"""Settings of the data room: which questions, in which shares, how they are split, framed and filtered.

Plain frozen pydantic models without torch, so that the config schema can embed them as sections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.data.json_text import half_character
from megarl.settings import HomePath, Section


class Framing(Section):
    """What is put around a question; the bare question is what is split, counted and checked for leaks."""

    system: str | None = Field(
        default=None, description="System message put before the question; None = none."
    )
    prefix: str = Field(default="", description="Text put directly before the last user message.")
    suffix: str = Field(
        default="", description="Text put directly behind the last user message (how to answer)."
    )

    @field_validator("system", "prefix", "suffix")
    @classmethod
    def _is_unicode(cls, text: str | None) -> str | None:
        if text is not None and (problem := half_character(text)) is not None:
            raise ValueError(problem)
        return text


class SourceSettings(Framing):
    name: str | None = Field(
        default=None,
        pattern=r"^[^/\s]+$",
        description="Unique name, the first part of prompt ids; None = the task's name or the file's stem.",
    )
    weight: float = Field(
        default=1.0, gt=0, description="Share of the prompts, relative to the other sources."
    )


class ReasoningGymSettings(SourceSettings):
    """A task of `reasoning-gym`, scored by the task itself."""

    kind: Literal["reasoning_gym"] = Field(default="reasoning_gym", description="Procedural questions.")
    task: str = Field(description="Name of the task, for example chain_sum; `composite` mixes several.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="The task's own parameters (difficulty), without seed and size."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the questions.")
    size: int | None = Field(
        default=None,
        gt=0,
        description="Questions in an epoch: exactly create_dataset(task, seed, size); None = endless.",
    )
    start: int = Field(
        default=0,
        ge=0,
        description="Number of the first question that is drawn from an endless task. Questions before it are never "
        "trained on: they may be those that a cold start's demonstrations answer.",
    )

    @model_validator(mode="after")
    def _start_is_of_an_endless_task(self) -> ReasoningGymSettings:
        if self.start and self.size is not None:
            raise ValueError(f"start={self.start} is for an endless task: leave out size, or start")
        return self


Role = Literal["question", "answer", "messages", "response", "chosen", "rejected", "verifier"]


class RowSettings(Section):
    """Rows on disk and how they are read."""

    path: HomePath = Field(description="A file, a folder of files, or a folder written by `save_to_disk`.")
    format: Literal["jsonl", "json", "csv", "tsv", "parquet"] | None = Field(
        default=None, description="Format of the files; None = by each name's ending (.gz too)."
    )
    split: str | None = Field(default=None, description="Split of a folder that holds several.")
    preset: str | None = Field(
        default=None, description="Shape of the rows by name, for example gsm8k; None = as `columns` says."
    )
    columns: dict[Role, str] = Field(
        default_factory=dict,
        description="Column of each role, in place of the preset's; a dotted name looks inside objects.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="A row that can't be used is an error, or left out and counted."
    )
    delimiter: str = Field(default=",", min_length=1, max_length=1, description="What separates CSV fields.")
    max_row_bytes: int = Field(
        default=64 << 20, gt=0, description="Longest row of a text file in bytes; a longer one is a bad row."
    )


class FileSettings(SourceSettings, RowSettings):
    """Questions in files."""

    kind: Literal["file"] = Field(default="file", description="Questions in files.")
    ground_truth: dict[str, str] = Field(
        default_factory=dict,
        description="Further columns for the verifier, by the ground truth's key: for example {tests: cases}.",
    )
    verifier: str | None = Field(
        default=None, description="Who scores the answers; None = as the preset says (math, code)."
    )


Source = Annotated[ReasoningGymSettings | FileSettings, Field(discriminator="kind")]


class HeldOutSettings(Section):
    """Questions of the training sources that are never trained on, chosen by a hash of their text."""

    fraction: float = Field(
        default=0.1, ge=0, lt=1, description="Share of all questions held out of training."
    )
    count: int = Field(default=200, ge=0, description="Most held-out prompts of each source to evaluate on.")
    salt: str = Field(default="", description="Another salt holds out other questions.")


class DataSettings(Section):
    """Where prompts come from."""

    sources: tuple[Source, ...] = Field(min_length=1, description="Training sources, mixed by weight.")
    evaluations: dict[str, Source] = Field(
        default_factory=dict,
        description="Sources to evaluate on by name; their questions are kept out of training.",
    )
    heldout: HeldOutSettings = Field(default_factory=HeldOutSettings, description="The held-out split.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the order of the prompts.")
    shuffle: bool = Field(default=True, description="Shuffle each epoch; False keeps the sources' own order.")
    max_prompt_tokens: int | None = Field(
        default=None, gt=0, description="Longest prompt in tokens, template included; None = no bound."
    )
    overlong: Literal["skip", "error"] = Field(
        default="skip", description="What a longer prompt is: left out and counted, or an error."
    )
    duplicates: Literal["drop", "keep"] = Field(
        default="drop", description="Questions met before (whitespace aside): left out and counted, or kept."
    )
    leaks: Literal["drop", "error"] = Field(
        default="drop",
        description="Training questions that an evaluation holds: left out and counted, or an error.",
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> DataSettings:
        names = [*(source_name(s) for s in self.sources), *self.evaluations]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two sources or evaluations are named {twice[0]!r}: give each its own name")
        return self


class DemonstrationSettings(RowSettings):
    """Conversations to learn from."""

    shuffle: bool = Field(default=True, description="Shuffle each epoch; False keeps the rows' own order.")
    seed: int = Field(default=0, ge=0, description="Seed of the order of the rows.")
    max_tokens: int | None = Field(
        default=None, gt=0, description="Longest sequence in tokens; None = no bound. None is ever cut."
    )
    overlong: Literal["skip", "error"] = Field(
        default="skip", description="What a longer sequence is: left out and counted, or an error."
    )


def source_name(source: ReasoningGymSettings | FileSettings) -> str:
    """Return the name a source goes by: its own, its task's, or its file's stem."""
    if source.name:
        return source.name
    if isinstance(source, ReasoningGymSettings):
        return source.task
    return Path(source.path).name.split(".")[0].replace(" ", "_") or "file"
