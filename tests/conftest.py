"""What all tests share: one thread per process, no network, ranks, and tiny checkpoints.

Nothing here imports torch: with `-n`, the process that only hands out tests would wait for it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import hypothesis
import pytest

from tests.ranks import RankPool

# The same examples in every run; `--hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Gloo ranks: `ranks.run(2, job, **arguments)`."""
    return RankPool()


@pytest.fixture(scope="session")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-MoE of 4 layers, the second of them dense; an odd vocabulary."""
    from tests import models

    folder = tmp_path_factory.mktemp("models") / "moe"
    return models.tiny_qwen3_moe(folder, num_hidden_layers=4, mlp_only_layers=[1], vocab_size=265)


@pytest.fixture(scope="session")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random dense Qwen3 with tied embeddings."""
    from tests import models

    folder = tmp_path_factory.mktemp("models") / "dense"
    return models.tiny_qwen3(folder, num_hidden_layers=4, tie_word_embeddings=True)
