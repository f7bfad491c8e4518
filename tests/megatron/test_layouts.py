"""Every layout computes the same numbers as one rank: log-probabilities, entropies, expert choices, metrics, the full
gradient, trained weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron.jobs import layout_job, make_samples
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed

VOCABULARY = 265
LOGPROBS = 2e-5  # absolute, float32
GRADIENTS = 1e-4  # relative in norm, for each tensor

# name: ranks, layout, model settings
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "EP2": (2, {"expert": 2}, {}),
    "TP2": (2, {"tensor": 2}, {}),
    "PP2": (2, {"pipeline": 2}, {}),
    "CP2": (2, {"context": 2}, {}),
    "DP2": (2, {}, {}),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "PP2, uneven": (2, {"pipeline": 2}, {"transformer": {"num_layers_in_first_pipeline_stage": 1}}),
    "PP2, full recompute": (2, {"pipeline": 2}, {"recompute": "full"}),
    "EP2, full recompute": (2, {"expert": 2}, {"recompute": "full"}),
    "TP2, selective recompute": (2, {"tensor": 2}, {"recompute": "selective"}),
    "EP2, allgather": (2, {"expert": 2}, {"transformer": {"moe_token_dispatcher_type": "allgather"}}),
    "DP4": (4, {}, {}),  # the last replica has no sample
    "EP2xETP2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, {}),
    "TP2xEP2": (4, {"tensor": 2, "expert": 2}, {}),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}, {}),
    "TP2xCP2": (4, {"tensor": 2, "context": 2}, {}),
    "PP2xEP2": (4, {"pipeline": 2, "expert": 2}, {}),
    "CP2xEP2": (2, {"context": 2, "expert": 2}, {}),
    "TP2xPP2xEP2xDP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
}


@pytest.fixture(scope="module")
def engine(ranks: RankPool, moe_checkpoint: Path) -> dict[str, np.ndarray]:
    """The engine's log-probabilities of every response: the policy's own and some noise, so that some ratios are
    clipped."""
    found = ranks.run(1, layout_job, checkpoint=moe_checkpoint, layout={})[0]["samples"]
    rng = np.random.default_rng(1)
    responses = {sample.sample_id: len(sample.response_ids) for sample in make_samples(9, VOCABULARY)}
    return {
        name: logprobs[-n - 1 : -1].numpy() + rng.normal(0, 0.1, n).astype(np.float32)
        for name, n in responses.items()
        for logprobs, _ in [found[name]]
    }


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_checkpoint: Path, engine: dict[str, np.ndarray]) -> dict[str, Any]:
    return ranks.run(1, layout_job, checkpoint=moe_checkpoint, layout={}, engine=engine)[0]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines that are printed when all layouts are through."""
    lines = [f"{'layout':<26} {'log-probability':>15} {'gradient':>9} {'weight':>9}   largest differences"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_rank(
    name: str,
    ranks: RankPool,
    moe_checkpoint: Path,
    engine: dict[str, np.ndarray],
    one_rank: dict[str, Any],
    table: list[str],
) -> None:
    size, layout, options = LAYOUTS[name]
    parts = ranks.run(size, layout_job, checkpoint=moe_checkpoint, layout=layout, engine=engine, **options)
    got = parts[0]
    samples = {sample: pair for part in parts for sample, pair in part["samples"].items()}
    assert samples.keys() == one_rank["samples"].keys()
    apart = max(
        float((value - expected).abs().max())
        for sample, pair in one_rank["samples"].items()
        for expected, value in zip(pair, samples[sample], strict=True)
    )
    assert apart < LOGPROBS
    experts = {place: chosen for part in parts for place, chosen in part["experts"].items()}
    assert experts == one_rank["experts"]
    for part in parts:
        assert part["metrics"] == pytest.approx(one_rank["metrics"], rel=1e-4, abs=1e-6)

    gradient = max(
        float((got["gradients"][tensor] - expected).norm() / expected.norm().clamp(min=1e-12))
        for tensor, expected in one_rank["gradients"].items()
    )
    weight = max(
        float((got["weights"][tensor] - expected).abs().max())
        for tensor, expected in one_rank["weights"].items()
    )
    table.append(f"{name:<26} {apart:15.1e} {gradient:9.1e} {weight:9.1e}")
    assert got["gradients"].keys() == one_rank["gradients"].keys()
    assert gradient < GRADIENTS
    assert got["weights"].keys() == one_rank["weights"].keys()
    assert weight < 2e-6  # a fifth of a step of Adam


def test_the_batch_is_one_that_can_go_wrong(one_rank: dict[str, Any], engine: dict[str, np.ndarray]) -> None:
    """Some ratios are clipped, every tensor has a gradient, and the steps moved the weights."""
    metrics = one_rank["metrics"]
    assert 0 < metrics["grpo/train/clip_fraction"] < 1
    assert 0 < metrics["gspo/train/clip_fraction"] < 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(float(g.norm()) > 0 for g in one_rank["gradients"].values())
