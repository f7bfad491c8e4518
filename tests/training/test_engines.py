"""Engines under the ranks of a run, with scripted engines on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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


def test_routes_reach_the_ranks_that_compute_their_layers_and_no_others(
    ranks: RankPool, moe_checkpoint: Path
) -> None:
    """Two pipeline stages; the second of four layers is dense."""
    leader, other = ranks.run(2, share_job, checkpoint=moe_checkpoint, layout={"pipeline": 2})
    assert (leader["layers"], other["layers"]) == ([0], [2, 3])
    assert leader["samples"] == other["samples"]
    assert all(routes is None for _, _, routes in leader["samples"])
    for name, experts in leader["sent"].items():
        np.testing.assert_array_equal(leader["kept"][name], experts[:, :1])
        np.testing.assert_array_equal(other["kept"][name], experts[:, 1:])
    for found in (leader, other):
        assert found["told"] == "sample 'p/0#0.0.0': the engine returned no routes"
