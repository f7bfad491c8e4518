"""The kinds of stages a run can have. A kind is one file: its class, and how it is opened from a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from megarl.training.resolve import StagePlan
from megarl.training.run import Run
from megarl.training.stages.stage import AuxiliaryModels, Stage

KINDS: Mapping[str, str] = {
    "sft": "megarl.training.stages.sft:open_stage",
    "rl": "megarl.training.stages.rl:open_stage",
}

__all__ = ["KINDS", "AuxiliaryModels", "Stage", "open_stage"]


def open_stage(run: Run, plan: StagePlan) -> Stage:
    """Open a stage on this rank: `module:function` of its kind makes it from the run. Collective."""
    module, _, function = KINDS.get(plan.kind, plan.kind).partition(":")
    opener: Callable[[Run, StagePlan], Stage] = getattr(importlib.import_module(module), function)
    return opener(run, plan)
