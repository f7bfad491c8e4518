"""Batches at the edge: nothing active, nothing at all, fillers, extreme numbers, missing arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megarl.algorithms import (
    RECIPES,
    Recipe,
    Rewards,
    add_token_weights,
    assign_advantages,
    finalize,
    get_recipe,
    policy_loss,
    value_loss,
)
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.parts import find_part
from megarl.algorithms.weights import local_totals
from megarl.errors import UserError
from megarl.monitor.policy_metrics import POLICY
from megarl.records import MicroBatch
from tests.algorithms.batches import (
    advantages_of,
    alone,
    every_combination,
    filler,
    identify,
    make_batch,
    ragged,
    run,
    take,
    totals_of,
    weights_of,
)


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
def test_with_all_responses_masked_the_loss_is_zero_and_no_number_is_made_up(recipe: Recipe) -> None:
    batch = ragged(2, responses=5)
    batch = replace(batch, mask=torch.zeros_like(batch.mask))
    output, gradient = run(recipe, batch)
    logged = finalize(output.metrics)
    assert float(output.loss) == 0
    assert (gradient == 0).all()
    assert logged["train/active_tokens"] == logged["train/active_responses"] == 0
    assert all(math.isfinite(x) for x in logged.values())
    assert not {"train/ratio_mean", "train/clip_fraction", "train/ratio_max", "train/entropy"} & logged.keys()


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
def test_there_may_be_no_responses(recipe: Recipe) -> None:
    nothing, _ = take(ragged(2, responses=2), [])
    output, gradient = run(recipe, nothing)
    assert float(output.loss) == 0
    assert gradient.shape == (0,)
    assert finalize(output.metrics)["train/active_tokens"] == 0


def add_passes(micro_batch: MicroBatch) -> MicroBatch:
    zeros = torch.zeros(micro_batch.tokens)
    return micro_batch.with_columns(old_logprobs=zeros, ref_logprobs=zeros, values=zeros)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_filler_micro_batch_has_the_metric_names_of_any_other_and_no_gradient(name: str) -> None:
    """One masked padding token, one sequence for attention, no rows: what replicas in step run on."""
    recipe, one = RECIPES[name], torch.zeros(1)
    batch = make_batch(torch.empty(0), torch.empty(0, dtype=torch.int64), filler())
    (batch,) = assign_advantages([replace(batch, micro_batches=(add_passes(filler()),))], recipe, alone)
    batch = add_token_weights(batch, recipe, max_length=8, reduce_sum=lambda x: x + 3)
    (micro_batch,) = batch.micro_batches
    assert batch.active_tokens == 3
    leaf = one.clone().requires_grad_()
    output = policy_loss(
        recipe,
        logprobs=leaf,
        old_logprobs=one,
        advantages=micro_batch.columns["advantages"],
        mask=micro_batch.mask,
        cu_seqlens=micro_batch.cu_seqlens,
        weights=micro_batch.columns["weights"],
        engine_logprobs=one,
        ref_logprobs=one,
        entropy=one,
    )
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    assert leaf.grad is not None
    assert float(leaf.grad) == 0
    assert output.metrics.keys() == run(recipe, ragged(2, responses=5))[0].metrics.keys()


@pytest.mark.parametrize("recipe", every_combination(), ids=identify)
@pytest.mark.parametrize("jump", [100.0, -100.0])
def test_a_log_ratio_of_a_hundred_is_clamped_and_counted(recipe: Recipe, jump: float) -> None:
    batch = ragged(4, responses=12)
    where = batch.mask.nonzero().squeeze(1)[:2]
    logprobs = batch.old_logprobs.clone()
    logprobs[where] += jump
    output, gradient = run(recipe, replace(batch, logprobs=logprobs))
    logged = finalize(output.metrics)
    assert logged["train/ratio_clamped"] == 2
    assert math.isfinite(float(output.loss))
    assert gradient.isfinite().all()
    assert all(math.isfinite(x) for x in logged.values())


def test_a_kl_estimate_far_from_the_reference_is_bounded_counted_and_has_no_gradient() -> None:
    logprobs = torch.tensor([-3.5, -3.0, -100.0, -1.0], requires_grad=True)  # e^3 - 1 - 3 > 10
    reference = torch.tensor([-0.5, -3.0, -0.5, -101.0])
    k1, k2, k3 = (
        kl_estimate(find_part("kl", kind), logprobs, reference).value for kind in ("k1", "k2", "k3")
    )
    assert k1.tolist() == [-3.0, 0.0, -20.0, 20.0]
    assert k2.tolist() == [4.5, 0.0, 200.0, 200.0]
    assert k3.tolist() == pytest.approx([10.0, 0.0, 10.0, 10.0])
    k3.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()

    batch = ragged(4, responses=12)
    where = int(batch.mask.nonzero()[0])
    reference = batch.logprobs.clone()
    reference[where] += 3.0
    logged = finalize(run(RECIPES["grpo"], replace(batch, ref_logprobs=reference))[0].metrics)
    assert logged["train/kl_clamped"] == 1


def test_a_clamped_sequence_ratio_is_counted_once_per_response() -> None:
    batch = ragged(4, responses=12)
    active = [bool(batch.mask[b:e].any()) for b, e in batch.spans]
    logged = finalize(run(RECIPES["gspo"], replace(batch, logprobs=batch.old_logprobs - 100))[0].metrics)
    assert logged["train/seq_ratio_clamped"] == sum(active)


def test_infinite_log_probabilities_of_the_sampler_do_not_break_the_loss() -> None:
    """An engine that rounds the probability of a sampled token to 0 gives a bounded weight."""
    batch = ragged(4, responses=12)
    engine = batch.engine_logprobs.clone()
    engine[int(batch.mask.nonzero()[0])] = -math.inf
    output, gradient = run(get_recipe("dapo", correction="tis"), replace(batch, engine_logprobs=engine))
    assert math.isfinite(float(output.loss))
    assert gradient.isfinite().all()


def test_a_nan_in_an_active_token_is_never_hidden() -> None:
    batch = ragged(4, responses=12)
    logprobs = batch.logprobs.clone()
    logprobs[int(batch.mask.nonzero()[0])] = math.nan
    output, _ = run(RECIPES["grpo"], replace(batch, logprobs=logprobs))
    assert math.isnan(float(output.loss))
    assert math.isnan(finalize(output.metrics)["train/ratio_mean"])


def test_half_precision_log_probabilities_are_worked_on_in_float32() -> None:
    batch = ragged(4, responses=12)
    half = replace(batch, logprobs=batch.logprobs.bfloat16(), old_logprobs=batch.old_logprobs.bfloat16())
    wide = replace(batch, logprobs=half.logprobs.float(), old_logprobs=half.old_logprobs.float())
    assert float(run(RECIPES["dapo"], half)[0].loss) == float(run(RECIPES["dapo"], wide)[0].loss)


def test_padding_tokens_after_the_last_response_belong_to_none() -> None:
    batch = ragged(4, responses=12)
    longer = {
        name: torch.cat([getattr(batch, name), torch.zeros(3)])
        for name in ("logprobs", "old_logprobs", "engine_logprobs", "ref_logprobs", "entropy")
    }
    padded = replace(batch, **longer, mask=torch.cat([batch.mask, torch.zeros(3, dtype=torch.bool)]))
    assert float(run(RECIPES["gspo"], padded)[0].loss) == float(run(RECIPES["gspo"], batch)[0].loss)


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ({"kl": "k3"}, "ref_logprobs"),
        ({"correction": "tis"}, "engine_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
    ],
)
def test_a_missing_argument_is_named_with_what_needs_it(overrides: dict[str, object], missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is needed by"):
        run(get_recipe("dapo", **overrides), ragged(4), **{missing: None})


def test_misshapen_arguments_are_named() -> None:
    batch = ragged(4, responses=12)
    with pytest.raises(ValueError, match="old_logprobs has shape"):
        run(RECIPES["dapo"], batch, old_logprobs=torch.zeros(3))
    with pytest.raises(ValueError, match="advantages has shape"):
        run(RECIPES["dapo"], batch, advantages=torch.zeros(5))
    with pytest.raises(ValueError, match="mask must be bool"):
        run(RECIPES["dapo"], batch, weights=torch.zeros(len(batch.mask)), mask=batch.mask.int())


def test_no_public_call_broadcasts_what_is_misshapen() -> None:
    """A critic's [T, 1] against [T] would be a [T, T] of nonsense."""
    batch = ragged(4, responses=12)
    mask, cu_seqlens, flat, rewards = batch.mask, batch.cu_seqlens, batch.entropy, batch.advantages
    column, one = flat[:, None], flat[:1]
    loss = {"values": flat, "old_values": flat, "returns": flat, "mask": mask, "weights": flat}
    for name in ("values", "old_values", "returns", "weights"):
        for wrong in (column, one):
            with pytest.raises(ValueError, match=rf"^{name} has shape"):
                value_loss(**(loss | {name: wrong}))
    recipe = get_recipe("ppo", kl="k1")
    passes = {"values": flat, "old_logprobs": flat, "ref_logprobs": flat}
    for name in passes:
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            advantages_of(recipe, rewards, batch.group_ids, mask, cu_seqlens, **(passes | {name: column}))
    for wrong in (column, one):
        with pytest.raises(ValueError, match="ref_logprobs"):
            kl_estimate(find_part("kl", "k3"), flat, wrong)
    for groups in (batch.group_ids[None], batch.group_ids[1:]):
        with pytest.raises(ValueError, match="group_ids has shape"):
            weights_of("token_mean", replace(batch, group_ids=groups))
    with pytest.raises(ValueError, match="rewards must be"):
        Rewards.of(rewards[None], batch.group_ids[None])
    for name in ("group_ids", "lengths", "greedy_rewards"):
        given = {"group_ids": batch.group_ids} | {name: rewards[1:]}
        with pytest.raises(ValueError, match=f"{name} has shape"):
            Rewards.of(rewards, **given)


def test_constant_weights_need_the_generation_budget() -> None:
    batch = ragged(4)
    with pytest.raises(UserError, match="generation budget"):
        weights_of("constant", batch, totals_of(batch)._replace(max_length=None))
    with pytest.raises(UserError, match="Did you mean 'token_mean'"):
        weights_of("token_maen", batch)


def test_a_response_without_active_tokens_is_counted_nowhere() -> None:
    totals = local_totals(lengths=torch.tensor([3, 0, 2, 0]), group_ids=torch.tensor([7, 7, 9, 1]))
    assert totals.counts.tolist() == [5, 2, 2]
    assert totals.group_tokens.tolist() == [3, 3, 2, 0]


def test_every_metric_of_every_recipe_is_described() -> None:
    batch = ragged(4, responses=12)
    for recipe in RECIPES.values():
        logged = finalize(run(replace(recipe, off_policy_delta=0.1), batch)[0].metrics)
        assert logged.keys() <= {metric.name for metric in POLICY}, recipe.name
