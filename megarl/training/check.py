"""`megarl check`: what the start of a run would refuse, found by one process without ranks, weights or servers."""

from __future__ import annotations

from contextlib import closing

from megarl.config.schema import Config
from megarl.data.prompts import open_prompts
from megarl.rewards import Scorer
from megarl.training.resolve import resolve
from megarl.training.run import open_demonstrations, open_tokenizer


def check_run(config: Config, ranks: int) -> str:
    """Return one sentence about a run of so many ranks. Raises UserError for the first thing that is wrong: what
    `resolve` refuses, then tokenizer, data and verifiers."""
    plan = resolve(config, ranks)
    tokenizer = open_tokenizer(config)
    tokenizer.check_embedding(plan.architecture.vocab_size)
    prompts = open_prompts(plan.data, tokenizer)
    open_demonstrations(plan.stages, tokenizer, plan.architecture.max_positions)
    with closing(Scorer(config.rewards)) as scorer:
        scorer.check(prompts.verifiers)
    what = f"{plan.recipe.name} on {ranks} ranks, old log-probabilities: {plan.sources.old_logprobs}."
    return f"{what} {tokenizer.describe_stops()}"
