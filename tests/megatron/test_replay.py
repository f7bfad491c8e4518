"""Routing replay against Hugging Face's model with its experts forced, in every layout and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tests.megatron.jobs import make_samples, replay_job
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed

PAD = 3
VOCABULARY, EXPERTS, TOP_K, MOE_LAYERS = 265, 8, 2, (0, 2, 3)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "one rank, full recompute": (1, {}, {"recompute": "full"}),
    "EP2": (2, {"expert": 2}, {}),
    "TP2": (2, {"tensor": 2}, {}),
    "CP2": (2, {"context": 2}, {}),
    "PP2": (2, {"pipeline": 2}, {}),
    "PP2, full recompute": (2, {"pipeline": 2}, {"recompute": "full"}),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "PP2xVPP2, full recompute": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": "full"}),
    "EP2, allgather": (2, {"expert": 2}, {"transformer": {"moe_token_dispatcher_type": "allgather"}}),
    "TP2xCP2": (4, {"tensor": 2, "context": 2}, {}),
    "TP2xPP2xEP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
}


@pytest.fixture(scope="module")
def routes() -> dict[str, np.ndarray]:
    """Random experts for every token of the batch."""
    rng = np.random.default_rng(7)
    return {
        s.sample_id: rng.random((s.tokens - 1, len(MOE_LAYERS), EXPERTS))
        .argsort(-1)[..., :TOP_K]
        .astype(np.uint8)
        for s in make_samples(9, VOCABULARY)
    }


class Forced:
    """Stands in for a router's forward: a masked softmax over given experts; the live ones for the last token."""

    def __init__(self, router: torch.nn.Module) -> None:
        self.router, self.experts = router, torch.empty(0)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.router.weight.T
        chosen = torch.cat([self.experts, logits[-1:].topk(TOP_K).indices])
        allowed = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        return logits, weights.gather(1, chosen), chosen


@pytest.fixture(scope="module")
def truth(moe_checkpoint: Path, routes: dict[str, np.ndarray]) -> dict[str, Any]:
    """Log-probabilities of each sample and the gradient of their sum / 100, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        moe_checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    forced = []
    for layer in MOE_LAYERS:
        gate = model.model.layers[layer].mlp.gate
        forced.append(Forced(gate))
        gate.forward = forced[-1]
    logprobs = {}
    for sample in make_samples(9, VOCABULARY):
        for n, gate in enumerate(forced):
            gate.experts = torch.from_numpy(routes[sample.sample_id][:, n].astype(np.int64))
        ids = torch.tensor([*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()])
        scored = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        mask = np.concatenate([np.zeros(len(sample.prompt.token_ids) - 1, bool), sample.loss_mask])
        scored = scored * torch.from_numpy(mask)
        (scored.sum() / 100).backward()
        logprobs[sample.sample_id] = scored.detach()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logprobs": logprobs, "gradients": revert_weight_conversion(model, gradients)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_routes_are_followed_as_a_direct_computation_says(
    name: str, ranks: RankPool, moe_checkpoint: Path, routes: dict[str, np.ndarray], truth: dict[str, Any]
) -> None:
    size, layout, options = LAYOUTS[name]
    parts = ranks.run(size, replay_job, checkpoint=moe_checkpoint, layout=layout, given=routes, **options)
    scored = {sample: values for part in parts for sample, values in part["logprobs"].items()}
    assert scored.keys() == truth["logprobs"].keys()
    for sample, expected in truth["logprobs"].items():
        torch.testing.assert_close(scored[sample][:-1].double(), expected, atol=2e-5, rtol=0)
    got = parts[0]["gradients"]
    got["model.embed_tokens.weight"][PAD] = 0  # transformers gives its padding token no gradient
    assert got.keys() == truth["gradients"].keys()
    for tensor, expected in truth["gradients"].items():
        assert float((got[tensor] - expected).norm() / expected.norm()) < 1e-4, tensor
    samples = make_samples(9, VOCABULARY)
    tokens, whole = sum(s.tokens - 1 for s in samples), sum(s.tokens for s in samples)
    for part in parts:
        # of what was recorded, every token counts once, and no padding
        assert part["sizes"]["routes"] == part["sizes"]["tokens"] == [whole] * len(MOE_LAYERS)
        assert part["sizes"]["load"] == [whole * TOP_K] * len(MOE_LAYERS)
        assert part["tokens"][0] == tokens
        assert part["tokens"] == parts[0]["tokens"]
        assert 0.5 < part["flips"] < 1  # random routes are hardly ever the live ones
        assert part["flips"] == parts[0]["flips"]


def test_routers_do_have_a_gradient(truth: dict[str, Any]) -> None:
    for layer in MOE_LAYERS:
        assert truth["gradients"][f"model.layers.{layer}.mlp.gate.weight"].norm() > 1e-3
