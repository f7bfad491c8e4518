"""Tokens per second of the embedded engine beside `transformers.generate`, on one tiny MoE policy.

    OMP_NUM_THREADS=1 python benchmarks/embedded.py [--responses 128] [--group 8] [--repeats 5]

Both sample the same number of tokens for each prompt (5 to 80, drawn per response) at temperature 1. The engine
also returns log-probabilities, and in its last line routes; `generate` returns neither. They take turns and the
best turn of each counts, in CPU seconds of this process, since other work on the machine only slows one down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StoppingCriteria, StoppingCriteriaList
from transformers.core_model_loading import revert_weight_conversion

from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.engine import GenerateRequest, SamplingParams, iterate

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}


class PerRowLimit(StoppingCriteria):
    """Row i of a `generate` batch stops after limits[i] new tokens."""

    def __init__(self, width: int, limits: torch.Tensor):
        self.width, self.limits = width, limits

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] - self.width >= self.limits


def work(responses: int, group: int) -> tuple[list[np.ndarray], list[int]]:
    """Prompts of 20 to 40 tokens, each `group` times, and the length of every response."""
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, CONFIG["vocab_size"], rng.integers(20, 41)) for _ in range(-(-responses // group))
    ]
    return [prompts[i // group] for i in range(responses)], rng.integers(5, 81, responses).tolist()


def by_generate(network: torch.nn.Module, prompts: list[np.ndarray], limits: list[int], batch: int) -> None:
    for start in range(0, len(prompts), batch):
        part, most = prompts[start : start + batch], torch.tensor(limits[start : start + batch])
        width = max(len(p) for p in part)
        ids = torch.stack([torch.from_numpy(np.pad(p, (width - len(p), 0))) for p in part])
        mask = torch.stack([torch.arange(width) >= width - len(p) for p in part]).long()
        network.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=int(most.max()),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([PerRowLimit(width, most)]),
        )


def by_engine(engine: EmbeddedEngine, prompts: list[np.ndarray], limits: list[int], routes: bool) -> None:
    asked = [
        GenerateRequest(str(i), prompt, SamplingParams(max_new_tokens=n, seed=i), routes)
        for i, (prompt, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    made = sum(len(result.response_ids) for result in iterate(engine.generate(asked)))
    assert made == sum(limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    config = Qwen3MoeConfig(**CONFIG)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    engine = EmbeddedEngine(config)
    engine.start()
    engine.update_weights(revert_weight_conversion(network, network.state_dict()).items(), 1)
    prompts, limits = work(options.responses, options.group)

    contestants: dict[str, Callable[[], None]] = {
        "transformers.generate, batches of 64": lambda: by_generate(network, prompts, limits, 64),
        "transformers.generate, one batch": lambda: by_generate(network, prompts, limits, len(prompts)),
        "embedded engine": lambda: by_engine(engine, prompts, limits, routes=False),
        "embedded engine, with routes": lambda: by_engine(engine, prompts, limits, routes=True),
    }
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(options.repeats):
        for name, contestant in contestants.items():
            begin = time.process_time()
            contestant()
            best[name] = min(best[name], time.process_time() - begin)

    parameters = sum(p.numel() for p in network.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(prompts)} responses, {sum(limits)} tokens, "
          f"{torch.get_num_threads()} thread(s), best of {options.repeats}")  # fmt: skip
    fastest_generate = min(seconds for name, seconds in best.items() if name.startswith("transformers"))
    for name, seconds in best.items():
        print(f"{name:38s} {sum(limits) / seconds:9,.0f} tokens/s   x{fastest_generate / seconds:.2f}")


if __name__ == "__main__":
    main()
