"""A user's own engine, named by import path, is read, checked and made as megarl's are."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.config.load import make_config, to_yaml
from megarl.config.schema import Config
from megarl.errors import UserError
from megarl.rollout.registry import ENGINES
from tests.rollout.scripted import CONTEXT, ScriptedEngine, ScriptedSettings

OWN = "tests.rollout.scripted:ScriptedSettings"


def config_with(engine: dict[str, Any]) -> Config:
    return make_config(
        {
            "model": {"path": "policy"},
            "data": {"sources": [{"kind": "reasoning_gym", "task": "chain_sum"}]},
            "engine": engine,
        }
    )


def test_an_engine_is_a_few_lines_outside_the_package() -> None:
    config = config_with({"kind": OWN, "fails": ["no_routes"]})
    assert config.engine == ScriptedSettings(kind=OWN, fails=("no_routes",))
    assert make_config(yaml.safe_load(to_yaml(config))) == config
    engine = config.engine.make(CONTEXT)
    assert isinstance(engine, ScriptedEngine)
    assert engine.urls() == ()
    assert not config.engine.shared


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"kind": OWN, "failz": []}, "engine: failz: .* Known there: kind, fails"),
        ({"kind": OWN, "fails": ["never"]}, "engine: fails.0: input should be 'no_start'"),
        ({"kind": "tests.rollout.scripted:ScriptedSetting"}, r"Did you mean 'ScriptedSettings'"),
        ({"kind": "tests.rollout.scripted:ScriptedEngine"}, "no class 'ScriptedEngine' derived from .*EngineSettings"),
        ({"kind": "tests.nowhere:Settings"}, r"engine.kind: cannot import 'tests.nowhere' \(ModuleNotFoundError"),
        ({"kind": "sglang", "urls": ["http://x"], "port": 3}, "engine.port: it is for servers that megarl starts"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_engines_section_is_told_with_its_key(engine: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"(?i){told}"):
        config_with(engine)


def test_every_engine_of_megarl_says_its_kind_and_what_its_settings_mean() -> None:
    kinds = [settings().kind for settings in ENGINES]  # type: ignore[call-arg]
    assert kinds == ["embedded", "sglang"]
    for settings in ENGINES:
        assert settings.__doc__
        assert all(field.description for field in settings.model_fields.values())
