"""Layers that do not divide by the pipeline's length: the last stage, which has the LM head, gets fewer."""

from __future__ import annotations

import pytest

from megarl.errors import UserError
from megarl.megatron.layout import Layout
from megarl.megatron.model import _last_stage


@pytest.mark.parametrize(
    ("layers", "stages", "last"), [(60, 4, None), (61, 4, 13), (61, 16, 1), (27, 2, 13), (3, 2, 1)]
)
def test_the_last_stage_has_fewer_layers(layers: int, stages: int, last: int | None) -> None:
    assert _last_stage(layers, Layout(pipeline=stages)) == last
    if last is not None:
        assert (layers - last) % (stages - 1) == 0
        assert last < (layers - last) // (stages - 1)


def test_an_empty_stage_is_refused() -> None:
    with pytest.raises(UserError, match="4 layers leave one of 3 stages empty"):
        _last_stage(4, Layout(pipeline=3))
