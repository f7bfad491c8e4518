"""Golden trajectories: a run's first steps as numbers, which a change that isn't meant to change them must not change.

Sampling is scripted (responses drawn by their seeds alone, all tokens equally likely), so that no token depends on
rounding and the numbers hold on any machine. `python -m tests.training.golden` writes them anew: a decision.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.records import WeightSpan
from megarl.rewards import GroundTruth, Response
from megarl.rollout.declaration import EngineContext
from megarl.rollout.engine import GenerateRequest, GenerateResult
from tests.rollout.scripted import ScriptedEngine, ScriptedSettings
from tests.training.jobs import open_tiny, prepared

FILE = Path(__file__).parents[1] / "fixtures" / "golden_trajectories.json"
STEPS = 2
RECIPES = {
    "GSPO": ("algorithm=gspo",),
    "GRPO, recorded routes": ("algorithm={name: grpo, kl: none}",),
    "PPO, KL in the reward": ("algorithm={name: ppo, kl: k1, kl_in: reward, kl_coef: 0.05}",),
    "DAPO": ("algorithm=dapo", "rewards.soft_overlong=4"),
}
WORDS = (
    "launch.ranks=1",
    "parallel.expert=1",
    "sft.steps=0",
    f"rl.steps={STEPS}",
    "rl.optimizer={lr: 1.0e-2, min_lr: 0, eps: 1.0e-3}",  # proportional to the gradient, not its sign
    "rl.critic.optimizer={lr: 1.0e-2, eps: 1.0e-3}",
    "rl.audit_every=2",
    "engine={kind: tests.training.golden:EvenSettings}",
    "rewards={workers: 0, verifiers: [{name: tests.training.golden:even}]}",
    "data.heldout={count: 0}",
)


def even(response: Response, ground_truth: GroundTruth) -> float:
    """A verifier: is the response's length in bytes even?"""
    return float(len(response.text.encode()) % 2 == 0)


class EvenSettings(ScriptedSettings):
    """An engine to which all tokens are equally likely."""

    kind: str = "tests.training.golden:EvenSettings"

    def make(self, context: EngineContext, urls: Sequence[str] = ()) -> ScriptedEngine:
        return EvenEngine(context)


class EvenEngine(ScriptedEngine):
    """Responses by the request's seed alone, whatever the weights."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[GenerateResult]:
        vocabulary = self.context.architecture.vocab_size
        for request in requests:
            random = np.random.RandomState(request.sampling.seed % 2**32)  # its streams are frozen
            length = random.randint(1, request.sampling.max_new_tokens + 1)
            ids = random.randint(3, vocabulary, length).astype(np.int32)
            logprobs = np.full(length, -np.log(vocabulary), np.float32)
            spans = (WeightSpan(self.weight_version, 0, length),)
            yield GenerateResult(request.request_id, ids, logprobs, "stop", spans)


def forty_prompts(folder: Path, verifier: str = "tests.training.golden:even") -> str:
    """A word of the command line: train on forty questions, which this writes."""
    prompts = folder / os.environ["RANK"] / "prompts.jsonl"
    prompts.parent.mkdir()
    prompts.write_text("".join(f'{{"question": "{n} + {n} =", "answer": "{2 * n}"}}\n' for n in range(40)))
    columns = "{question: question, answer: answer}"
    return f"data.sources=[{{kind: file, path: {prompts}, columns: {columns}, verifier: {verifier}}}]"


def trajectory_job(folder: Path, words: tuple[str, ...]) -> list[dict[str, float]]:
    """The metrics of the first steps, without timings."""
    run = open_tiny(folder, *WORDS, forty_prompts(folder), *words)
    stage: Any = prepared(run, "rl")
    steps = [stage.step(step, step - 1) for step in range(1, STEPS + 1)]
    run.close()
    timings = ("perf/", "sync/")
    return [{k: v for k, v in metrics.items() if not k.startswith(timings)} for metrics in steps]


def main() -> None:
    from tests import models
    from tests.ranks import RankPool

    with tempfile.TemporaryDirectory() as folder:
        models.small_quickstart(Path(folder) / "quickstart")
        ranks, made = RankPool(), {}
        for number, (name, words) in enumerate(RECIPES.items()):
            place = Path(folder) / "run" / str(number)
            place.mkdir(parents=True)
            made[name] = ranks.run(1, trajectory_job, folder=place, words=words)[0]
    FILE.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
