"""New weights reach an engine in the contract's order, and the engine goes on whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megarl.rollout.sync import SyncFailed, give_weights
from tests.rollout.scripted import scripted

WEIGHTS = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.zeros(3, 4)}


def test_weights_are_given_while_the_engine_is_paused_and_proved_before_it_goes_on() -> None:
    engine = scripted()
    give_weights(engine, WEIGHTS.items(), 3)
    assert engine.calls == ["pause", "flush", "update_weights", "fingerprint", "resume"]
    assert engine.weight_version == 3


def test_one_lost_bit_is_noticed_and_the_tensor_is_named() -> None:
    engine = scripted("flipped_bit")
    with pytest.raises(SyncFailed, match=r"version 3 .* 1 of 2 tensors differ, first 'model.norm.weight'"):
        give_weights(engine, WEIGHTS.items(), 3)
    assert engine.calls[-1] == "resume"


def test_an_engine_is_not_left_paused_when_the_stream_breaks_off() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS.items()
        raise RuntimeError("a rank died")

    engine = scripted()
    with pytest.raises(RuntimeError, match="a rank died"):
        give_weights(engine, broken(), 3)
    assert engine.calls[-1] == "resume"
    assert engine.weight_version == 0
