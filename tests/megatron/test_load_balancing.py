"""The load-balancing modes: off unless asked for, the gradient that their formulas say in every layout, a bias that is
kept."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megarl.errors import UserError
from megarl.megatron.model import transformer_config
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout, ModelSettings
from megarl.weights.checkpoint_files import read_config
from megarl.weights.families import family_of
from tests.megatron.jobs import balance_batches, balance_job, bias_job
from tests.ranks import RankPool
from tests.weights.families import make

pytestmark = pytest.mark.distributed


RATE, TOP_K, EXPERTS = 1e-3, 2, 8
LOSSES: dict[str, dict[str, Any]] = {
    "load balancing, z": {
        "load_balancing": "aux_loss",
        "load_balancing_rate": RATE,
        "transformer": {"moe_z_loss_coeff": 2 * RATE},
    },
    "sequence, global": {
        "transformer": {
            "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [RATE, 2 * RATE],
        }
    },
}
# name: ranks, layout, recompute
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "DP2": (2, {}, "none"),
    "CP2, full recompute": (2, {"context": 2}, "full"),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, "none"),
    "TP2xCP2": (4, {"tensor": 2, "context": 2}, "none"),
    "EP2xETP2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, "none"),
}


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    losses = LOSSES | {"off": {}}
    return ranks.run(1, balance_job, checkpoint=moe_checkpoint, layout={}, losses=losses)[0]


def test_off_by_default_nothing_pulls_at_the_routers(one_rank: dict[str, dict[str, torch.Tensor]]) -> None:
    assert one_rank["off"]
    assert not any(gradient.any() for gradient in one_rank["off"].values())


@pytest.fixture(scope="module")
def truth(moe_checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The losses' gradients by transformers and their formulas: each a mean over all tokens of the step."""
    model = AutoModelForCausalLM.from_pretrained(
        moe_checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    batches = [
        [torch.from_numpy(np.concatenate([s.prompt.token_ids, s.response_ids]))[None] for s in samples]
        for samples in balance_batches(265)
    ]
    total = sum(ids.shape[1] for batch in batches for ids in batch)
    counts: dict[int, list[torch.Tensor]] = defaultdict(list)
    losses: dict[str, Any] = dict.fromkeys(LOSSES, 0.0)
    for batch in batches:
        outputs = [model(ids, output_router_logits=True).router_logits for ids in batch]
        for layer, parts in enumerate(zip(*outputs, strict=True)):
            logits = torch.cat(parts)
            chances, share = logits.softmax(1), len(logits) / total
            chosen = torch.zeros_like(logits).scatter_(1, logits.topk(TOP_K).indices, 1.0)
            counts[layer].append(chosen.sum(0))
            mean = torch.stack(counts[layer]).mean(0)  # over the micro-batches so far
            own, so_far = (
                EXPERTS * (used / TOP_K / len(logits) * chances.mean(0)).sum()
                for used in (chosen.sum(0), mean)
            )
            z = logits.logsumexp(1).square().mean()
            losses["load balancing, z"] += RATE * share * (own + 2 * z)
            losses["sequence, global"] += RATE * share * (own + 2 * so_far)
    found = {}
    for name, loss in losses.items():
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        known = {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}
        found[name] = revert_weight_conversion(model, known)
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_an_auxiliary_loss_is_the_mean_over_all_tokens_that_its_formula_says(
    loss: str, one_rank: dict[str, dict[str, torch.Tensor]], truth: dict[str, dict[str, torch.Tensor]]
) -> None:
    compare(one_rank[loss], truth[loss])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_auxiliary_loss_has_the_gradient_of_one_rank(
    name: str, ranks: RankPool, moe_checkpoint: Path, one_rank: dict[str, dict[str, torch.Tensor]]
) -> None:
    size, layout, recompute = LAYOUTS[name]
    arguments = {"checkpoint": moe_checkpoint, "layout": layout, "losses": LOSSES, "recompute": recompute}
    got = ranks.run(size, balance_job, **arguments)[0]
    for loss in LOSSES:
        compare(got[loss], one_rank[loss])


def compare(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every gradient, to a thousandth of its norm; there are some below the routers, too."""
    some = [name for name, gradient in expected.items() if gradient.norm() > 1e-9]
    assert sum("mlp.gate." in name for name in some) == 3
    assert sum("self_attn.v_proj" in name for name in some) == 4
    for name in some:
        assert float((got[name] - expected[name]).norm() / expected[name].norm()) < 1e-3, name


def test_a_bias_is_updated_kept_and_streamed(ranks: RankPool, tmp_path: Path) -> None:
    checkpoint = make("deepseek-v3", tmp_path / "model")
    found = ranks.run(2, bias_job, checkpoint=checkpoint, folder=tmp_path / "saved")[0]
    assert found["before"].keys() == found["after"].keys()
    assert found["after"]
    for name, after in found["after"].items():
        moved = (after - found["before"][name]).abs()
        assert moved.max() == pytest.approx(0.02)  # two updates by the rate
        assert torch.equal(found["loaded"][name], after)


def test_a_bias_needs_a_router_that_has_one(moe_checkpoint: Path) -> None:
    config = read_config(moe_checkpoint)
    settings = ModelSettings(dtype="float32", load_balancing="bias")
    with pytest.raises(UserError, match="does not have"):
        transformer_config(family_of(config).architecture(config), Layout(), Platform.detect("cpu"), settings)
