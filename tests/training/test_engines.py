"""Engines under the ranks of a run, with scripted engines on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models import tiny_qwen3_moe
from tests.ranks import RankPool
from tests.training.engine_jobs import connect_job, share_job, sync_job

pytestmark = pytest.mark.distributed

SERVER = ("http://first:1",)


def test_each_replicas_leader_has_an_engine_and_shared_servers_have_one_owner(ranks: RankPool) -> None:
    first, second = ranks.run(2, connect_job, tensor=1)
    assert (first["own"], second["own"]) == (((), True), ((), True))
    assert (first["shared"], second["shared"]) == ((SERVER, True), (SERVER, False))
    leader, other = ranks.run(2, connect_job, tensor=2)
    assert (leader["own"], other["own"]) == (((), True), (None, False))
    assert (leader["shared"], other["shared"]) == ((SERVER, True), (None, False))


def test_an_engine_that_does_not_start_is_refused_on_every_rank(ranks: RankPool) -> None:
    for tensor in (1, 2):
        told = [found["refused"] for found in ranks.run(2, connect_job, tensor=tensor)]
        assert told == ["the scripted engine does not start"] * 2


def test_every_rank_goes_through_the_weights_and_owners_give_them_to_their_engine(ranks: RankPool) -> None:
    synced = ["pause", "flush", "update_weights", "fingerprint", "resume"]
    own, shared = ranks.run(2, sync_job, shared=False), ranks.run(2, sync_job, shared=True)
    for found in (*own, *shared):
        assert found["read"] == ["a", "b", "c"]
        assert found["metrics"] == {"sync/bytes": 48.0, "sync/tensors": 3.0, "sync/version": 7.0}
        assert "version 8" in found["told"]
        assert "'a'" in found["told"]
    assert [found["calls"] for found in (*own, *shared)] == [synced, synced, synced, []]


@pytest.mark.parametrize(
    ("dense", "virtual", "layers", "columns"),
    [
        ([1], None, ([0], [2, 3]), ([0], [1, 2])),
        ([0], None, ([1], [2, 3]), ([0], [1, 2])),
        ([0], 2, ([2], [1, 3]), ([1], [0, 2])),  # chunks in turns: layers 0 and 2, 1 and 3
        ([0, 1], None, ([], [2, 3]), ([], [0, 1])),
        ([0, 1], 2, ([2], [3]), ([0], [1])),
    ],
)
def test_routes_reach_the_ranks_that_compute_their_layers_and_no_others(
    dense: list[int],
    virtual: int | None,
    layers: tuple[list[int], list[int]],
    columns: tuple[list[int], list[int]],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """Two pipeline stages of a model of four layers. dense: those without experts, which have no column in a trace."""
    checkpoint = tiny_qwen3_moe(tmp_path, num_hidden_layers=4, mlp_only_layers=dense)
    layout = {"pipeline": 2, "virtual_pipeline": virtual}
    leader, other = ranks.run(2, share_job, checkpoint=checkpoint, layout=layout)
    assert (leader["layers"], other["layers"]) == layers
    assert leader["samples"] == other["samples"]
    assert all(routes is None for _, _, routes in leader["samples"])
    assert leader["sent"]
    for name, experts in leader["sent"].items():
        for found, own in zip((leader, other), columns, strict=True):
            np.testing.assert_array_equal(found["kept"][name], experts[:, own])
    for found in (leader, other):
        assert found["told"] == "sample 'p/0#0.0.0': the engine returned no routes"
