"""What a training step costs with each source of old log-probabilities and each kind of routing replay, on the same
samples, in turns. `replay.py` and `logprob_source.py` measure it."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Timing, in_turns

from megarl.algorithms import LogprobAndRouteSource, get_recipe
from megarl.megatron.groups import destroy_groups, initialize
from megarl.megatron.platform import Platform
from megarl.megatron.policy import Policy
from megarl.megatron.settings import Layout, ModelSettings, OptimizerSettings
from megarl.records import Group, Prompt, Sample
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.engine import GenerateRequest, SamplingParams, iterate
from megarl.routing.store import RouteStore
from megarl.routing.trace import RouteShape, check_trace, stale_rows
from megarl.training.minibatches import make_minibatches
from megarl.training.scoring import with_engine_routes
from megarl.training.stages.stage import AuxiliaryModels
from megarl.training.update import PolicyUpdate
from megarl.weights.checkpoint_files import CheckpointReader, read_config
from megarl.weights.exchange import load
from megarl.weights.families import family_of
from megarl.weights.mapping import NameMap

Variants = Mapping[str, tuple[str, str]]  # by name: source of old log-probabilities, routing replay


@dataclass(frozen=True)
class StepSize:
    """A Qwen3-MoE policy and a rollout."""

    layers: int = 4
    hidden_size: int = 128
    expert_size: int = 128
    experts: int = 8
    top_k: int = 2
    vocabulary: int = 512
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 24
    response_tokens: int = 64
    minibatches: int = 4
    micro_batch_tokens: int = 4096


SIZES = {
    "tiny": StepSize(
        layers=1, hidden_size=32, expert_size=32, prompts=2, group_size=4, response_tokens=8, minibatches=2
    ),
    "small": StepSize(),
    "deep": StepSize(layers=12, experts=16, top_k=4),
    "wide": StepSize(hidden_size=384, expert_size=256, experts=16, top_k=4, vocabulary=4096),
}


def step_options(description: str) -> argparse.ArgumentParser:
    """The options of a benchmark of steps."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--size", choices=[*SIZES, "all"], default="all", help="a tiny policy, or all of them"
    )
    parser.add_argument(
        "--turns", type=int, default=7, help="times that each variant is measured, at least 2"
    )
    return parser


def bench_sizes(size: str, variants: Variants, *, turns: int) -> None:
    """Measure a policy of this size, or of all sizes, and print its table."""
    for name in SIZES if size == "all" else [size]:
        print(f"{name}: {bench_step(SIZES[name], variants, turns=turns).table()}\n")


@dataclass(frozen=True)
class StepBench:
    """generate_seconds: of the rollout, by the embedded engine, routes included. timings: by variant, of everything
    between the rollout and the weight sync."""

    size: StepSize
    generate_seconds: float
    timings: Mapping[str, Timing]

    def table(self) -> str:
        s = self.size
        lines = [
            f"{s.layers} layers, hidden {s.hidden_size}, {s.experts} experts of {s.expert_size}, top-{s.top_k}; "
            f"{s.prompts} x {s.group_size} responses of {s.response_tokens} tokens, {s.minibatches} mini-batches; "
            f"generation {self.generate_seconds:.2f} s",
            f"{'variant':<16} {'train step':>11}   ratio to the first (quartiles)",
        ]
        lines += [f"{name:<16} {timing}" for name, timing in self.timings.items()]
        if "engine" in self.timings:
            saved = self.saved_share()
            lines.append(
                f"the engine's log-probabilities save {saved[0]:.1%} of the training step, {saved[1]:.1%} of "
                "generation and training together"
            )
        return "\n".join(lines)

    def saved_share(self) -> tuple[float, float]:
        """By taking the engine's log-probabilities in place of a recompute pass: of the training step, and of
        generation and training."""
        pairs = list(zip(self.timings["recompute"].seconds, self.timings["engine"].seconds, strict=True))
        train = float(np.median([1 - engine / recompute for recompute, engine in pairs]))
        step = float(np.median([(r - e) / (r + self.generate_seconds) for r, e in pairs]))
        return train, step


def bench_step(size: StepSize, variants: Variants, *, turns: int) -> StepBench:
    """Measure on this process alone. Leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _bench(size, variants, Path(folder), turns)
        finally:
            destroy_groups()


def _bench(size: StepSize, variants: Variants, folder: Path, turns: int) -> StepBench:
    policy = make_trainer(size, folder)
    platform, architecture = policy.platform, policy.architecture
    engine = EmbeddedEngine(folder, device=platform.device, dtype=platform.dtype)
    engine.start()
    start = time.perf_counter()
    sampled = _rollout(engine, size)
    seconds = time.perf_counter() - start
    engine.close()
    shape = RouteShape(architecture.moe_layers, architecture.num_experts, architecture.top_k)

    def step(old: str, routing: str) -> None:
        recipe = get_recipe("grpo", kl="none", old_logprobs=old, routing_replay=routing)
        update = PolicyUpdate(
            policy,
            recipe,
            LogprobAndRouteSource(old, routing),
            AuxiliaryModels(),
            temperature=1.0,
            max_new_tokens=size.response_tokens,
        )
        budget = size.micro_batch_tokens
        batches = make_minibatches(sampled, size.minibatches, policy, token_budget=budget, seed=0, step=0)
        if routing == "engine":  # checked and stored, as in training
            store = RouteStore()
            for sample in (s for g in sampled for s in g.samples):
                trace = check_trace(sample, shape)
                store.add(sample.sample_id, trace.experts, stale_rows(sample, trace))
            batches = with_engine_routes(batches, store, policy)
        update.learn(update.score(batches))

    timings = in_turns({name: partial(step, *pair) for name, pair in variants.items()}, turns=turns)
    return StepBench(size, seconds, timings)


def make_trainer(size: StepSize, folder: Path) -> Policy:
    """Make a policy of that size in `folder`, alone in its world and with an optimizer."""
    make_policy(size, folder)
    platform = Platform.detect()
    groups = initialize(Layout(), platform, seed=0)
    config = read_config(folder)
    architecture = family_of(config).architecture(config)
    policy = Policy(architecture, Layout(), platform, groups, ModelSettings())
    load(NameMap(config, policy), CheckpointReader(folder))
    policy.set_optimizer(OptimizerSettings(lr=1e-6))
    return policy


def make_policy(size: StepSize, folder: Path) -> None:
    """A checkpoint with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden_size,
            intermediate_size=2 * size.hidden_size,
            moe_intermediate_size=size.expert_size,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=size.hidden_size // 4,  # type: ignore[call-arg]
            num_experts=size.experts,
            num_experts_per_tok=size.top_k,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
    ).save_pretrained(folder)


def _rollout(engine: EmbeddedEngine, size: StepSize) -> list[Group]:
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(f"p/{n}", rng.integers(0, size.vocabulary, size.prompt_tokens), "", "none", {})
        for n in range(size.prompts)
    ]
    sampling: dict[str, Any] = {"max_new_tokens": size.response_tokens, "temperature": 1.0}
    requests = {
        f"{n}/{k}": GenerateRequest(
            f"{n}/{k}", prompt.token_ids, SamplingParams(seed=n * size.group_size + k, **sampling), True
        )
        for n, prompt in enumerate(prompts)
        for k in range(size.group_size)
    }
    results = {r.request_id: r for r in iterate(engine.generate(list(requests.values())))}
    groups = []
    for n, prompt in enumerate(prompts):
        samples = []
        for k in range(size.group_size):
            result = results[f"{n}/{k}"]
            sample = Sample(
                prompt,
                f"{prompt.prompt_id}#{k}",
                result.response_ids,
                result.logprobs,
                np.ones(len(result.response_ids), bool),
                result.finish_reason,
                result.spans,
                result.routes,
                reward=float(rng.integers(0, 2)),
            )
            samples.append(sample)
        groups.append(Group(prompt, tuple(samples)))
    return groups
