"""One engine of each kind for the whole session, in a known state at the start of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.rollout.engine import Engine
from tests.models import tiny_qwen3_moe
from tests.rollout.engines import ENGINES
from tests.rollout.reference import Reference, checkpoint_weights


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that engines are made with."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def newer_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("newer"), seed=1)


@pytest.fixture(scope="session")
def reference(policy: Path) -> Reference:
    return Reference(policy)


@pytest.fixture(scope="session")
def newer_reference(newer_policy: Path) -> Reference:
    return Reference(newer_policy)


@pytest.fixture(scope="session")
def engine_of(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """The session's engine of this name (`tests.rollout.engines`), made when it is first asked for."""
    made: dict[str, Engine] = {}

    def engine_of(name: str) -> Engine:
        if name not in made:
            entry = next(entry for entry in ENGINES if entry.name == name)
            made[name] = entry.make(policy, tmp_path_factory.mktemp(name))
        return made[name]

    yield engine_of
    for engine in made.values():
        engine.close()


@pytest.fixture(params=[pytest.param(entry.name, marks=entry.marks) for entry in ENGINES])
def engine(
    request: pytest.FixtureRequest, engine_of: Callable[[str], Engine], policy: Path
) -> Iterator[Engine]:
    """Each engine in turn: started, not paused, with the weights of `policy` (of whatever version)."""
    engine = engine_of(request.param)
    yield from prepared(engine, policy)


def prepared(engine: Engine, policy: Path) -> Iterator[Engine]:
    """Start it before a test; put it back as it was after it."""
    engine.start()
    version = engine.weight_version
    yield engine
    if engine.health() is None:
        engine.resume()
        if engine.weight_version != version:
            engine.update_weights(checkpoint_weights(policy).items(), engine.weight_version + 1)
