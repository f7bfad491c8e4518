"""What the loss costs: no question to the device, no graph break, a handful of vectors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from megarl.algorithms import RECIPES, finalize, get_recipe, policy_loss
from tests.algorithms.batches import ragged

VECTORS_AT_PEAK = 18
VECTORS_KEPT = 8


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_loss_never_asks_the_device_for_a_value(name: str) -> None:
    """Fake tensors have no values: whatever would wait for one (item, nonzero, a Python `if`) raises."""
    recipe = get_recipe(name, entropy_coef=0.01, off_policy_delta=0.1)
    batch = ragged(4, responses=12)
    mode = FakeTensorMode()
    given = vars(batch) | {"advantages": batch.token_advantages}
    fake = {key: mode.from_tensor(value) for key, value in given.items() if key != "group_ids"}
    with mode:
        fake["logprobs"].requires_grad_()
        output = policy_loss(recipe, **fake, weights=torch.ones_like(fake["logprobs"]))
        output.loss.backward()


@pytest.mark.parametrize("name", ["gspo", "minirl"])
def test_the_loss_compiles_to_one_graph_with_the_same_result(name: str) -> None:
    recipe = get_recipe(name)
    batch = ragged(4, responses=12)
    given = {key: value for key, value in vars(batch).items() if key not in ("group_ids", "logprobs")}
    given["advantages"] = batch.token_advantages

    def loss(logprobs: torch.Tensor):  # type: ignore[no-untyped-def]
        return policy_loss(recipe, logprobs=logprobs, **given, weights=torch.full_like(logprobs, 0.1))

    torch._dynamo.reset()
    leaves = [batch.logprobs.clone().requires_grad_() for _ in range(2)]
    eager = loss(leaves[0])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(leaves[1])
    for output in (eager, compiled):
        output.loss.backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
    assert finalize(compiled.metrics) == pytest.approx(finalize(eager.metrics))


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "sapo", "minirl"])
def test_a_million_tokens_take_a_handful_of_vectors(name: str) -> None:
    """At most 18 float32 [T] beside the arguments while it runs, 8 until the backward pass."""
    tokens, responses = 2**20, 256
    recipe = get_recipe(name)
    old = -3 * torch.rand(tokens)
    logprobs = (old + 0.01).requires_grad_()
    mask, weights, entropy = torch.rand(tokens) > 0.3, torch.full((tokens,), 1e-6), torch.rand(tokens)
    cu_seqlens = torch.arange(0, tokens + 1, tokens // responses, dtype=torch.int32)
    advantages = torch.randn(tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        output = policy_loss(
            recipe,
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            mask=mask,
            cu_seqlens=cu_seqlens,
            weights=weights,
            engine_logprobs=old,
            ref_logprobs=old if "ref_logprobs" in recipe.needs else None,
            entropy=entropy,
        )
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    vector = 4 * tokens
    assert 5 * vector < peak <= VECTORS_AT_PEAK * vector, f"{peak / vector:.1f} vectors"
    assert now <= VECTORS_KEPT * vector, f"{now / vector:.1f} vectors"
    output.loss.backward()
    assert logprobs.grad is not None
