"""Jobs that the Megatron tests run on several ranks."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megarl.algorithms import LogprobAndRouteSource, get_recipe
from megarl.data.packing import make_micro_batches
from megarl.megatron.critic import Critic
from megarl.megatron.groups import Groups, initialize
from megarl.megatron.platform import Platform
from megarl.megatron.policy import Policy
from megarl.megatron.reference import ReferencePolicy
from megarl.megatron.settings import Layout, ModelSettings, OptimizerSettings
from megarl.megatron.sharding import shard_layout
from megarl.records import Group, MicroBatch, Prompt, Sample, WeightSpan
from megarl.routing.agreement import routing_disagreement
from megarl.routing.replay import GivenRoutes, Routes
from megarl.routing.store import RouteStore
from megarl.routing.trace import RoutingError
from megarl.training.minibatches import make_minibatches
from megarl.training.stages.stage import AuxiliaryModels
from megarl.training.update import PolicyUpdate
from megarl.weights.checkpoint_files import CheckpointReader, read_config
from megarl.weights.exchange import iter_hf_tensors, load
from megarl.weights.families import family_of
from megarl.weights.mapping import NameMap

STILL = OptimizerSettings(lr=1e-30, clip_grad=1e30)  # leaves the weights as they are, and gradients whole


def join(layout: dict[str, Any]) -> Groups:
    """Enter the world in this layout; once a job."""
    return initialize(Layout(**layout), Platform.detect("cpu"), seed=1)


def build(
    checkpoint: Path,
    layout: dict[str, Any],
    groups: Groups | None = None,
    *,
    distributed_optimizer: bool = True,
    dtype: Any = "float32",
    **options: Any,
) -> tuple[Policy, NameMap]:
    """A trainer with the checkpoint's weights on this rank. options: of ModelSettings."""
    groups = groups or join(layout)
    config = read_config(checkpoint)
    policy = Policy(
        family_of(config).architecture(config),
        Layout(**layout),
        Platform.detect("cpu"),
        groups,
        ModelSettings(dtype=dtype, **options),
        distributed_optimizer=distributed_optimizer,
    )
    name_map = NameMap(config, policy)
    load(name_map, CheckpointReader(checkpoint))
    return policy, name_map


def make_samples(count: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Ragged random responses, odd lengths, three to a prompt; the first is long, the last is fully masked."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for n in range(count):
        if n % 3 == 0:
            prompt = Prompt(f"p/{n // 3}", rng.integers(0, vocabulary, rng.integers(1, 20)), "", "exact", {})
        length = int(rng.integers(1, 40)) if n else 61
        mask = rng.random(length) < 0.9 if n < count - 1 else np.zeros(length, bool)
        samples.append(
            Sample(
                prompt,
                f"{prompt.prompt_id}#{n}",
                rng.integers(0, vocabulary, length),
                -rng.random(length),
                mask,
                "stop",
                (WeightSpan(0, 0, length),),
                reward=float(rng.random()),
            )
        )
    return samples


BUDGET = 160  # tokens of a micro-batch


def layout_job(
    checkpoint: Path, layout: dict[str, Any], engine: dict[str, np.ndarray] | None = None, **options: Any
) -> dict[str, Any]:
    """A fixed global batch, spread over the replicas: log-probabilities, entropies and expert choices, then the
    gradient of a GRPO step, then metrics and weights after a GRPO and a GSPO step.

    engine: the samples' log-probabilities; without them, only the first part is computed.
    """
    ranks = join(layout)
    policy, name_map = build(checkpoint, layout, ranks, distributed_optimizer=False, **options)
    samples = make_samples(9, policy.architecture.vocab_size)
    groups = [Group(s.prompt, tuple(samples[n : n + 3])) for n, s in enumerate(samples) if n % 3 == 0]
    mine = groups[ranks.replica_index :: ranks.replica_count]
    flat = [s for g in mine for s in g.samples]
    count = max(1, ranks.max_over_replicas(len(make_micro_batches(flat, BUDGET)) if flat else 0))
    count = -(-count // policy.micro_batch_multiple) * policy.micro_batch_multiple
    micro_batches = make_micro_batches(flat, BUDGET, count)
    with watched_routers(policy) as calls:
        passes = policy.compute_logprobs(micro_batches, temperature=0.8)
    result: dict[str, Any] = {"samples": {}, "experts": experts_of(policy, micro_batches, flat, calls)}
    for micro_batch, (logprobs, entropies) in zip(micro_batches, passes, strict=True):
        bounds = micro_batch.cu_seqlens.tolist()
        for n, row in enumerate(micro_batch.rows.tolist()):
            part = slice(bounds[n], bounds[n + 1])
            result["samples"][flat[row].sample_id] = (logprobs[part], entropies[part])
    if engine is None:
        return result

    mine = [Group(g.prompt, tuple(replace(s, logprobs=engine[s.sample_id]) for s in g.samples)) for g in mine]

    def update(policy: Policy, algorithm: str) -> dict[str, float]:
        recipe = get_recipe(algorithm, clip_low=0.05, clip_high=0.05, kl="none")
        sources = LogprobAndRouteSource("engine", "off")
        update = PolicyUpdate(policy, recipe, sources, AuxiliaryModels(), temperature=0.8, max_new_tokens=64)
        batches = make_minibatches(mine, 1, policy, token_budget=BUDGET, seed=0, step=0)
        return update.learn(update.score(batches))

    policy.set_optimizer(OptimizerSettings(lr=1e-3, clip_grad=1e30))
    update(policy, "grpo")
    result["gradients"] = dict(iter_hf_tensors(name_map, lambda parameter: parameter.main_grad))
    policy, name_map = build(checkpoint, layout, ranks, **options)
    policy.set_optimizer(OptimizerSettings(lr=1e-5))
    metrics = {f"{name}/{k}": v for name in ("grpo", "gspo") for k, v in update(policy, name).items()}
    result["metrics"] = {k: v for k, v in metrics.items() if not k.endswith("/micro_batches")}
    result["weights"] = dict(iter_hf_tensors(name_map))
    return result


@contextmanager
def watched_routers(policy: Policy) -> Iterator[dict[int, list[torch.Tensor]]]:
    """By global layer number, the routing map of every router call, [this rank's tokens, experts]."""
    calls: dict[int, list[torch.Tensor]] = defaultdict(list)
    hooks = [
        router.register_forward_hook(
            lambda module, _, output: calls[module.layer_number - 1].append(output[1].clone())
        )
        for chunk in policy.chunks
        for router in chunk.modules()
        if isinstance(router, TopKRouter)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def experts_of(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    samples: Sequence[Sample],
    calls: dict[int, list[torch.Tensor]],
) -> dict[tuple[str, int, int], tuple[int, ...]]:
    """(sample, layer, input position) -> experts, of the tokens that this rank routed."""
    found = {}
    for layer, maps in calls.items():
        for micro_batch, routed in zip(micro_batches, maps, strict=True):
            sharding = shard_layout(
                micro_batch.cu_seqlens,
                context=policy.layout.context,
                tensor=policy.layout.tensor,
                at_least=len(routed) * policy.layout.tensor * policy.layout.context,
            )
            here = sharding.shard(
                parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
            )
            bounds = micro_batch.cu_seqlens.tolist()
            for position, row in zip(sharding.source[here].tolist(), routed, strict=True):
                sequence = bisect.bisect_right(bounds, position) - 1
                if position >= 0 and sequence < len(micro_batch.rows):
                    sample = samples[int(micro_batch.rows[sequence])]
                    place_in_it = position - bounds[sequence]
                    found[sample.sample_id, layer, place_in_it] = tuple(row.nonzero().squeeze(1).tolist())
    return found


def checkpoint_job(checkpoint: Path, folder: Path, layout: dict[str, Any], phase: str) -> dict[str, Any]:
    """`straight`: four steps. `save`: two steps, then save. `load`: load, then two more steps."""
    from megarl.megatron.checkpoint import load_checkpoint, save_checkpoint

    policy, name_map = build(checkpoint, layout)
    groups = policy.groups
    samples = make_samples(6, policy.architecture.vocab_size)
    mine = samples[groups.replica_index :: groups.replica_count]
    count = groups.max_over_replicas(len(make_micro_batches(mine, 100)))
    count = -(-count // policy.micro_batch_multiple) * policy.micro_batch_multiple
    micro_batches = make_micro_batches(mine, 100, count)
    policy.set_optimizer(OptimizerSettings(lr=1e-3, warmup_steps=2, schedule="cosine"), 10)
    rates = []
    if phase == "load":
        load_checkpoint(folder, policy)
    for _ in range(4 if phase == "straight" else 2):
        result = policy.step(
            micro_batches, lambda micro_batch, logprobs, entropies: (-logprobs.sum() / 100, None)
        )
        rates.append(result.lr)
    if phase == "save":
        if groups.is_main:
            folder.mkdir()
        groups.barrier()
        save_checkpoint(folder, policy)
    return {"weights": dict(iter_hf_tensors(name_map)), "rates": rates}


def rates_job(checkpoint: Path, schedules: dict[str, dict[str, Any]], steps: int) -> dict[str, list[float]]:
    """By schedule, the learning rates of a stage of so many steps."""
    policy, _ = build(checkpoint, {})
    batch, rates = toy_batch(policy, seed=0), {}
    for name, settings in schedules.items():
        policy.set_optimizer(OptimizerSettings(lr=1.0, **settings), steps)
        rates[name] = []
        for _ in range(steps):
            result = policy.step(batch, lambda micro_batch, logprobs, entropies: (0 * logprobs.sum(), None))
            rates[name].append(result.lr)
    return rates


def toy_batch(policy: Policy, seed: int) -> list[MicroBatch]:
    """Prompts of three tokens, four response tokens, all random, all trained on."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            Prompt(f"p/{n}", rng.integers(0, 60, 3), "", "exact", {}),
            f"p/{n}#0",
            rng.integers(0, 60, 4),
            np.zeros(4),
            np.ones(4, bool),
            "stop",
            (WeightSpan(0, 0, 4),),
        )
        for n in range(32)
    ]
    mine = samples[policy.groups.replica_index :: policy.groups.replica_count]
    return list(make_micro_batches(mine, 112, 32 // policy.groups.replica_count * 7 // 112 or 1))


def true_returns(micro_batch: MicroBatch) -> torch.Tensor:
    """The toy problem: whether the sequence's first token is under 30; known from the prompt on."""
    lengths = micro_batch.cu_seqlens.diff()
    firsts = micro_batch.token_ids[micro_batch.cu_seqlens[:-1].long()]
    return (firsts < 30).float().repeat_interleave(lengths.long())


def critic_job(checkpoint: Path, layout: dict[str, Any], steps: int) -> dict[str, float]:
    """Errors of the values before and after learning, on data that was not learned from."""
    policy, _ = build(checkpoint, layout)
    policy.set_optimizer(OptimizerSettings(lr=1e-3))
    before = {name: p.clone() for chunk in policy.chunks for name, p in chunk.named_parameters()}
    critic = Critic(policy)
    critic.set_optimizer(OptimizerSettings(lr=2e-3))

    def error() -> float:
        batch = toy_batch(critic, seed=10_000)
        squares = [
            (values - true_returns(m))[m.mask].square()
            for m, values in zip(batch, critic.values(batch), strict=True)
        ]
        total = critic.groups.sum_over_replicas(torch.tensor([torch.cat(squares).sum(), 0.0]))
        return float(total[0]) / 128

    first = error()
    norms = []
    for step in range(steps):
        batch = toy_batch(critic, seed=step)

        def loss(micro_batch: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
            off = (values - true_returns(micro_batch))[micro_batch.mask]
            return off.square().sum() / 128, None

        norms.append(critic.step(batch, loss).grad_norm)
    after = {name: p for chunk in policy.chunks for name, p in chunk.named_parameters()}
    assert all(torch.equal(after[name], p) for name, p in before.items()), "the policy moved"
    return {"before": first, "after": error(), "first_norm": norms[0], "second_norm": norms[1]}


def reference_job(checkpoint: Path, layout: dict[str, Any]) -> None:
    """The reference scores as the policy did when it was made, before and after the policy has moved."""
    policy, name_map = build(checkpoint, layout)
    policy.set_optimizer(OptimizerSettings(lr=1e-2))
    batch = toy_batch(policy, seed=0)

    def scores() -> torch.Tensor:
        return torch.cat([logprobs for logprobs, _ in policy.compute_logprobs(batch)])

    first = scores()
    reference = ReferencePolicy(policy)
    policy.step(batch, lambda micro_batch, logprobs, entropies: (logprobs.sum() / 100, None))
    moved, weights = scores(), {name: t.clone() for name, t in iter_hf_tensors(name_map)}
    assert (moved - first).abs().max() > 1e-2
    with reference.in_place():
        assert torch.equal(scores(), first)
    assert torch.equal(scores(), moved)
    assert all(torch.equal(t, weights[name]) for name, t in iter_hf_tensors(name_map))
    with contextlib.suppress(ZeroDivisionError), reference.in_place():
        raise ZeroDivisionError
    assert torch.equal(scores(), moved)  # whatever happens inside
    reference.replace()
    with reference.in_place():
        assert torch.equal(scores(), moved)


def replay_job(
    checkpoint: Path, layout: dict[str, Any], given: dict[str, np.ndarray], **options: Any
) -> dict[str, Any]:
    """Recorded routes replayed give the same bits; given ones are followed in forward and backward; nothing stays.

    given: by sample, uint8 [tokens - 1, MoE layers, top_k].
    """
    ranks = join(layout)
    policy, name_map = build(checkpoint, layout, ranks, distributed_optimizer=False, **options)
    replay = policy.replay
    assert replay is not None
    samples = make_samples(9, policy.architecture.vocab_size)
    mine = samples[ranks.replica_index :: ranks.replica_count]
    count = ranks.max_over_replicas(len(make_micro_batches(mine, BUDGET)))
    count = -(-count // policy.micro_batch_multiple) * policy.micro_batch_multiple
    micro_batches = make_micro_batches(mine, BUDGET, count)

    def routed(routes: Sequence[Routes]) -> list[MicroBatch]:
        return [m.with_routes(r) for m, r in zip(micro_batches, routes, strict=True)]

    def scores(routes: Sequence[Routes] | None = None) -> list[torch.Tensor]:
        if routes is None:
            pairs = policy.compute_logprobs(micro_batches)
        else:
            pairs = policy.compute_logprobs(routed(routes), replay="replay", count_routes=True)
        return [x for pair in pairs for x in pair]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    live = scores()
    with replay.recording() as recorded:
        assert same(scores(), live)
    assert len(recorded) == count
    assert same(scores(recorded), live)
    counts = policy.routing_counts()
    assert not counts.changed.any()
    sizes = {"routes": counts.routes, "tokens": counts.tokens, "load": counts.load.sum(1)}

    columns = [policy.architecture.moe_layers.index(n) for chunk in replay.layers for n in chunk]
    store = RouteStore()
    for sample in mine:
        experts = given[sample.sample_id][:, columns]
        store.add(sample.sample_id, experts, np.zeros(len(experts), bool))
    shape = (len(columns), policy.architecture.top_k)
    names = [[mine[row].sample_id for row in m.rows.tolist()] for m in micro_batches]
    routes = [GivenRoutes(partial(store.packed, chosen, shape)) for chosen in names]
    forced = scores(routes)
    counts = policy.routing_counts()
    policy.set_optimizer(STILL)
    seen: dict[int, torch.Tensor] = {}

    def loss(_: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return logprobs.sum() / 100, logprobs.detach()

    result = policy.step(routed(routes), loss, replay="replay")
    for n, logprobs in enumerate(ranks.share_from_last_stage(result.collected)):
        seen[n] = logprobs
    gradients = dict(iter_hf_tensors(name_map, lambda parameter: parameter.main_grad))
    assert same([seen[n] for n in range(count)], forced[::2]) or "recompute" in options
    policy.step(routed(routes), loss, replay="observe", count_routes=True)
    assert same(scores(), live), "something of the replay stayed"

    with contextlib.suppress(RoutingError):
        with replay.replaying("replay", count + 1, backward=False):
            policy.evaluate(routed(routes))
        raise AssertionError("an unused route was not noticed")
    assert same(scores(), live)
    by_sample = {}
    for n, micro_batch in enumerate(micro_batches):
        bounds = micro_batch.cu_seqlens.tolist()
        for k, row in enumerate(micro_batch.rows.tolist()):
            by_sample[mine[row].sample_id] = forced[2 * n][bounds[k] : bounds[k + 1]]
    return {
        "logprobs": by_sample,
        "gradients": gradients,
        "flips": routing_disagreement(counts),
        "tokens": (counts.known_tokens, counts.changed_tokens),
        "sizes": {name: vector.tolist() for name, vector in sizes.items()},
    }


def balance_batches(vocabulary: int) -> list[list[Sample]]:
    """Two micro-batches, of sequences that no layout pads."""
    rng = np.random.default_rng(3)

    def sample(name: str, tokens: int) -> Sample:
        prompt = Prompt(name, rng.integers(0, vocabulary, 5), "", "exact", {})
        response = rng.integers(0, vocabulary, tokens - 5)
        spans = (WeightSpan(0, 0, len(response)),)
        mask = np.ones(len(response), bool)
        return Sample(prompt, name, response, np.zeros(len(response)), mask, "stop", spans)

    return [[sample("a", 16), sample("b", 40)], [sample("c", 24)]]


def balance_job(
    checkpoint: Path, layout: dict[str, Any], losses: dict[str, dict[str, Any]], recompute: str = "none"
) -> dict[str, dict[str, torch.Tensor]]:
    """The gradient of each auxiliary loss alone. losses: its ModelSettings by name."""
    ranks, found = join(layout), {}
    for name, options in losses.items():
        policy, name_map = build(
            checkpoint, layout, ranks, distributed_optimizer=False, recompute=recompute, **options
        )
        policy.set_optimizer(STILL)
        batches = [
            make_micro_batches(samples, 1000)[0]
            for samples in balance_batches(policy.architecture.vocab_size)
        ]
        if "global" not in name:  # which looks at what the replicas do at the same time: they do the same
            batches = batches[ranks.replica_index :: ranks.replica_count]
        for _ in range(2):  # nothing is left of the step before
            policy.step(batches, lambda micro_batch, logprobs, entropies: (0.0 * logprobs.sum(), None))
        gradients = iter_hf_tensors(name_map, lambda parameter: parameter.main_grad)
        found[name] = {tensor: gradient.clone() for tensor, gradient in gradients}
    return found


def bias_job(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The routers' biases before and after two steps of their update, after a checkpoint, and as they are streamed."""
    from megarl.megatron.checkpoint import load_checkpoint, save_checkpoint

    ranks = join({"expert": 2})
    options: dict[str, Any] = {"load_balancing": "bias", "load_balancing_rate": 0.01}

    def biases(name_map: NameMap) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in iter_hf_tensors(name_map) if n.endswith("e_score_correction_bias")}

    policy, name_map = build(checkpoint, {"expert": 2}, ranks, **options)
    policy.set_optimizer(STILL)
    before = biases(name_map)
    batch = make_micro_batches(make_samples(9, policy.architecture.vocab_size), 10_000)
    for _ in range(2):
        policy.step(batch, lambda micro_batch, logprobs, entropies: (0.0 * logprobs.sum(), None))
    after = biases(name_map)
    if ranks.is_main:
        folder.mkdir()
    ranks.barrier()
    save_checkpoint(folder, policy)
    again, other_map = build(checkpoint, {"expert": 2}, ranks, **options)
    again.set_optimizer(STILL)
    load_checkpoint(folder, again)
    return {"before": before, "after": after, "loaded": biases(other_map)}


def not_finite_job(
    checkpoint: Path, layout: dict[str, Any], dtype: str = "float32", **options: Any
) -> dict[str, Any]:
    """Steps of a policy and of its critic, in some of which one rank's loss is NaN or one of its own experts' gradients
    infinite: what they report, whether those changed anything on this rank, and whether the others are as if they had
    not been."""
    ranks = join(layout)

    def models() -> list[Policy]:
        policy, _ = build(checkpoint, layout, ranks, dtype=dtype, **options)
        both = [policy, Critic(policy)]
        for model in both:
            model.set_optimizer(OptimizerSettings(lr=1e-3, warmup_steps=2, schedule="cosine"), 10)
        return both

    def step(model: Policy, loss: float = 1.0, gradient: float = 1.0) -> Any:
        if ranks.rank < ranks.world_size - 1:
            loss = gradient = 1.0
        expert = [p for name, p in model.chunks[-1].named_parameters() if ".experts." in name][-1]
        hook = expert.register_hook(lambda g: g * gradient)
        batch = toy_batch(model, seed=0)
        result = model.step(batch, lambda micro_batch, values, *_: (loss * values.square().sum() / 100, None))
        hook.remove()
        return result

    def state(model: Policy) -> list[torch.Tensor]:
        optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
        inner = [t for o in optimizers for s in o.optimizer.state.values() for t in s.values()]
        masters = [p for group in model.optimizer.param_groups for p in group["params"]]
        weights = [w for chunk in model.chunks for w in (*chunk.parameters(), *chunk.buffers())]
        counts = [model.scheduler.num_steps, *(group["lr"] for group in model.optimizer.param_groups)]
        return [torch.as_tensor(t).detach().clone() for t in (*inner, *masters, *weights, *counts)]

    def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
        return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    found: dict[str, Any] = {"stepped": [], "norms": [], "unchanged": [], "as_unbroken": []}
    for model, unbroken in zip(models(), models(), strict=True):
        for spoiled in ({}, {"loss": math.nan}, {}, {"gradient": math.inf}, {}):
            before, result = state(model), step(model, **spoiled)
            found["stepped"].append(result.stepped)
            found["norms"].append(result.grad_norm)
            found["unchanged"].append(same(before, state(model)))
            if result.stepped:
                step(unbroken)
        found["as_unbroken"].append(same(state(model), state(unbroken)))
        found["taken"] = model.steps_taken
    return found
