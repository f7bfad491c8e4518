"""The quickstart's kind of tokenizer, built once for the room's tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from examples.quickstart.make import build_tokenizer
from megarl.data.tokenizer import ChatTokenizer

TEXTS = ["What is 12 + 3 - 45?", "State the final answer to the following arithmetic problem: 6 - 7 ="] * 20

# A busy machine is not a wrong answer: no deadline for a single example.
settings.register_profile("data", deadline=None, max_examples=50)
settings.load_profile("data")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny", TEXTS)
