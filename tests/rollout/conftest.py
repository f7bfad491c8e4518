"""One engine of each kind for the whole session, in a known state at the start of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.rollout.engine import Engine
from tests.models import tiny_qwen3_moe
from tests.rollout.engines import ENGINES, EngineEntry
from tests.rollout.reference import Reference, checkpoint_weights


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that engines are made with."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def newer_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("newer"), seed=1)


@pytest.fixture(params=[pytest.param(entry, id=entry.name, marks=entry.marks) for entry in ENGINES])
def entry(request: pytest.FixtureRequest) -> EngineEntry:
    """Each engine in turn."""
    return request.param


@pytest.fixture(scope="session")
def reference_of() -> Callable[[EngineEntry, Path], Reference]:
    """What a model folder's weights say, in the engine's own way; loaded once."""
    made: dict[tuple[object, Path], Reference] = {}

    def reference_of(entry: EngineEntry, folder: Path) -> Reference:
        key = entry.reference, folder
        if key not in made:
            made[key] = entry.reference(folder)
        return made[key]

    return reference_of


@pytest.fixture
def reference(reference_of: Callable[..., Reference], entry: EngineEntry, policy: Path) -> Reference:
    return reference_of(entry, policy)


@pytest.fixture
def newer_reference(
    reference_of: Callable[..., Reference], entry: EngineEntry, newer_policy: Path
) -> Reference:
    return reference_of(entry, newer_policy)


@pytest.fixture(scope="session")
def engine_of(
    policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[EngineEntry], Engine]]:
    """The session's engine of this kind, made when it is first asked for."""
    made: dict[str, Engine] = {}

    def engine_of(entry: EngineEntry) -> Engine:
        if entry.name not in made:
            made[entry.name] = entry.make(policy, tmp_path_factory.mktemp(entry.name))
        return made[entry.name]

    yield engine_of
    for engine in made.values():
        engine.close()


@pytest.fixture
def engine(entry: EngineEntry, engine_of: Callable[[EngineEntry], Engine], policy: Path) -> Iterator[Engine]:
    """The engine: started, not paused, with the weights of `policy` (of whatever version)."""
    yield from prepared(engine_of(entry), policy)


def prepared(engine: Engine, policy: Path) -> Iterator[Engine]:
    """Start it before a test; put it back as it was after it."""
    engine.start()
    version = engine.weight_version
    yield engine
    if engine.health() is None:
        engine.resume()
        if engine.weight_version != version:
            engine.update_weights(checkpoint_weights(policy).items(), engine.weight_version + 1)
