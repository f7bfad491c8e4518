"""Lines for people: as they are, in a log file of any width."""

from __future__ import annotations

import pytest

from megarl.monitor.status import print_status


def test_a_line_is_written_whole_and_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    line = "warning: /a/folder with [brackets]/step_000002: it could not be written (File too large)"
    print_status(line)
    captured = capsys.readouterr()
    assert captured.err == f"{line}\n"
    assert captured.out == ""
