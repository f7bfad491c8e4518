"""`megarl check`: what the start of a run would refuse, found by one process without ranks, weights or servers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megarl.config.schema import Config
from megarl.data.prompts import open_prompts
from megarl.megatron.model import check_fits, transformer_config
from megarl.megatron.platform import Platform
from megarl.rewards import Scorer
from megarl.training.make_engine import check_engine
from megarl.training.make_model import made_config
from megarl.training.run import (
    check_context,
    check_recipe,
    check_shares,
    open_demonstrations,
    open_tokenizer,
    open_watch,
)
from megarl.weights.checkpoint_files import read_config
from megarl.weights.families import family_of


def check_run(config: Config, ranks: int) -> str:
    """One sentence about a run of so many ranks. Raises UserError for the first thing that is wrong, what is cheap to
    see first: counts, alarms, model, layout, algorithm, engine, then tokenizer, data and verifiers."""
    layout, model = config.parallel, config.model
    check_shares(config, ranks // layout.replica_ranks())
    open_watch(config)
    hf = made_config(model.make).to_dict() if model.make else read_config(Path(str(model.path)))
    architecture = family_of(hf, source=f"{model.path or 'model.make'}").architecture(hf)
    check_fits(architecture, layout, model.transformer)
    if config.platform != "cuda" or torch.cuda.is_available():  # else this machine is not the one it is for
        platform = Platform.detect(config.platform)
        transformer_config(architecture, layout, platform, model)
    data = check_context(config, architecture.max_positions)
    recipe, sources = check_recipe(config, moe=bool(architecture.moe_layers))
    check_engine(config, architecture)
    with TemporaryDirectory() as scratch:
        tokenizer = open_tokenizer(config, Path(scratch))
        if model.make is None or "vocab_size" in model.make:
            tokenizer.check_embedding(architecture.vocab_size)
        prompts = open_prompts(data, tokenizer)
        open_demonstrations(config, tokenizer, architecture.max_positions)
    with closing(Scorer(config.rewards)) as scorer:
        scorer.check(prompts.verifiers)
    return f"{recipe.name} on {ranks} ranks, old log-probabilities: {sources.old_logprobs}."
