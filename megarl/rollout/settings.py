"""Settings of the rollout room."""

from __future__ import annotations

from pydantic import Field, field_validator

from megarl.settings import Section


class SamplingSettings(Section):
    """How responses are drawn for training."""

    temperature: float = Field(
        default=1.0, gt=0, description="Softmax temperature, the same in the engine and the trainer."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Nucleus; < 1 samples from another distribution than the trainer's.",
    )
    top_k: int = Field(default=-1, ge=-1, description="Most likely tokens that are kept; -1 = all.")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Least probability of a token, relative to the likeliest one's."
    )
    max_new_tokens: int = Field(default=1024, ge=1, description="Longest response in tokens, EOS included.")

    @field_validator("top_k")
    @classmethod
    def _keeps_some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 keeps no token: -1 keeps all")
        return value
