"""What all tests share: one thread per process, no network, ranks, and tiny checkpoints.

Nothing here imports torch: with `-n`, the process that only hands out tests would wait for it, too.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import hypothesis
import pytest

from tests.ranks import RankPool

ALL_FAMILIES = "--all-families"
MARKS = ("slow", "sglang", "distributed")  # of the longest files

# The same examples in every run; `--hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file goes to one worker, in the order in which it is collected; those that share a server go together."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "server" if Path(file).name in ("test_engine_contract.py", "test_sglang.py") else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that in the end no worker waits for the other."""

    def length(item: pytest.Item) -> int:
        return next((n for n, mark in enumerate(MARKS) if item.get_closest_marker(mark)), len(MARKS))

    longest = {file: min(map(length, group)) for file, group in _by_file(items).items()}
    items.sort(key=lambda item: (longest[item.path], item.path))


def _by_file(items: list[pytest.Item]) -> dict[Path, list[pytest.Item]]:
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return files


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest files, from the first test's set-up to the last one's end."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("slowest files")
        for file, taken in seconds.most_common(10):
            terminalreporter.write_line(f"{taken:7.1f} s  {file}")


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Gloo ranks: `ranks.run(2, job, **arguments)`."""
    return RankPool()


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/quickstart.yaml with a smaller model and 64 demonstrations, which are made."""
    from tests import models

    return models.small_quickstart(tmp_path_factory.getbasetemp() / "quickstart")


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        ALL_FAMILIES,
        action="store_true",
        help="Behind SGLang: every family and a run of each, not one of each layout and a run of the first.",
    )
