"""What the system refuses to write is told as such, whoever writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.quickstart.make import build_tokenizer
from megarl.errors import UserError
from megarl.monitor.files import writing
from tests.disk import full_disk


@pytest.mark.parametrize("library", ["tokenizers", "safetensors", "python"])
def test_a_full_disk_is_told_whatever_the_library_makes_of_it(library: str, tmp_path: Path) -> None:
    write = {
        "tokenizers": lambda: build_tokenizer(tmp_path, ["a text"]),
        "safetensors": lambda: save_file({"w": torch.zeros(9999)}, tmp_path / "w.safetensors"),
        "python": lambda: (tmp_path / "file").write_bytes(bytes(9999)),
    }[library]
    with (
        full_disk(),
        pytest.raises(UserError, match=r"cannot be written \(File too large\)"),
        writing(tmp_path),
    ):
        write()


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a fault of ours"), writing(tmp_path):
        raise ValueError("a fault of ours")
