"""What all tests share: one thread per process, no network, and the pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import hypothesis
import pytest
import torch

from tests import models
from tests.ranks import RankPool

torch.set_num_threads(1)

# The same examples in every run; `--hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks, started once a file: `ranks.run(2, job, **arguments)`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/quickstart.yaml with a smaller model and 64 demonstrations, which are made."""
    return models.small_quickstart(tmp_path_factory.getbasetemp() / "quickstart")


@pytest.fixture(scope="session")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-MoE of 4 layers, the second of them dense; an odd vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    return models.tiny_qwen3_moe(folder, num_hidden_layers=4, mlp_only_layers=[1], vocab_size=265)


@pytest.fixture(scope="session")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random dense Qwen3 with tied embeddings."""
    folder = tmp_path_factory.mktemp("models") / "dense"
    return models.tiny_qwen3(folder, num_hidden_layers=4, tie_word_embeddings=True)
