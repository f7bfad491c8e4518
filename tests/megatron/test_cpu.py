"""The CPU adaptations fit the installed megatron-core, and an upgrade that moves things is told by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.megatron import cpu
from megarl.megatron.versions import SUPPORTED


def test_every_adapted_place_is_there_in_the_installed_version() -> None:
    assert cpu.check() == []


@pytest.mark.parametrize("adaptation", cpu.ADAPTATIONS, ids=lambda a: f"{a.module}:{a.name or 'torch'}")
def test_a_place_that_moved_is_named(adaptation: cpu.Adaptation, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [
        replace(adaptation, because="a line that is not there"),
        replace(adaptation, module=f"{adaptation.module}_gone"),
    ]
    if adaptation.name:
        moved.append(replace(adaptation, name="a_function_that_is_gone"))
    if callable(adaptation.replacement):
        moved.append(replace(adaptation, replacement=lambda: None))  # it takes other parameters
    for changed in moved:
        problem = changed.problem()
        assert problem is not None
        assert changed.module in problem
    monkeypatch.setattr(cpu, "ADAPTATIONS", tuple(moved))
    with pytest.raises(RuntimeError, match="do not fit megatron-core") as refusal:
        cpu.adapt()
    assert str(refusal.value).count("\n  ") == len(moved)
    assert f"pip install '{SUPPORTED}'" in str(refusal.value)
