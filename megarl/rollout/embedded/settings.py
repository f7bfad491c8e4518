"""The embedded engine's settings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megarl.rollout.declaration import EngineContext, EngineSettings

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine


class EmbeddedSettings(EngineSettings):
    """An engine inside each leader's process, for laptops and tests."""

    kind: Literal["embedded"] = Field(default="embedded", description="The small engine of megarl's own.")
    slots: int = Field(default=256, ge=1, description="Responses decoded together.")

    def make(self, context: EngineContext, urls: Sequence[str] = ()) -> Engine:
        from megarl.rollout.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(
            context.model_path,
            device=context.device,
            dtype=context.dtype,
            slots=self.slots,
            seed=context.seed,
        )
