"""Sample files: everything a person needs to judge a response, whole or absent."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.monitor.samples import SampleWriter
from megarl.records import Group, Prompt, Sample, WeightSpan


def group(prompt_id: str = "sum/0", dropped: str | None = None) -> Group:
    prompt = Prompt(prompt_id, np.array([5, 6]), "1 + 1 = ?", "reasoning_gym", {"answer": "2"})
    scored = Sample(
        prompt,
        f"{prompt_id}/0",
        np.array([7, 8, 2]),
        np.array([-0.1, -2.5, -1e-6], dtype=np.float32),
        np.array([True, True, False]),
        "stop",
        (WeightSpan(3, 0, 2), WeightSpan(4, 2, 3)),
        text="zwei “2”\n",
        reward=1.0,
        reward_parts={"correct": 1.0, "format": None},
    )
    unscored = Sample(
        prompt,
        f"{prompt_id}/1",
        np.array([9]),
        np.array([-0.3]),
        np.array([True]),
        "length",
        (WeightSpan(4, 0, 1),),
        unscored_reason="verifier timed out",
    )
    return Group(prompt, (scored, unscored), dropped)


def read(path: Path | None) -> list[dict[str, object]]:
    assert path is not None
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_tells_everything_about_a_response(tmp_path: Path) -> None:
    first, second = read(SampleWriter(tmp_path, every=1).write(10, [group(dropped="all correct")]))
    assert first == {
        "step": 10,
        "prompt_id": "sum/0",
        "sample_id": "sum/0/0",
        "prompt": "1 + 1 = ?",
        "response": "zwei “2”\n",
        "reward": 1.0,
        "reward_parts": {"correct": 1.0, "format": None},
        "unscored_reason": None,
        "group_dropped": "all correct",
        "finish_reason": "stop",
        "weight_versions": [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}],
        "prompt_ids": [5, 6],
        "response_ids": [7, 8, 2],
        "logprobs": [-0.1, -2.5, -1e-06],
        "loss_mask": [1, 1, 0],
    }
    assert second["reward"] is None
    assert second["unscored_reason"] == "verifier timed out"


def test_logprobs_come_back_exactly_in_float32(tmp_path: Path) -> None:
    values = -np.random.default_rng(0).exponential(size=200).astype(np.float32)
    prompt = group().prompt
    sample = Sample(prompt, "s", np.ones(200), values, np.ones(200), "stop", (WeightSpan(0, 0, 200),))
    (row,) = read(SampleWriter(tmp_path, every=1).write(0, [Group(prompt, (sample,))]))
    assert np.array_equal(np.array(row["logprobs"], dtype=np.float32), values)


def test_only_every_nth_step_is_written_and_only_where_it_is_wanted(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, every=5)
    for step in range(11):
        writer.write(step, [group()])
    SampleWriter(tmp_path, every=1, enabled=False).write(1, [group()])
    SampleWriter(tmp_path, every=0).write(2, [group()])
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["step_000000.jsonl", "step_000005.jsonl", "step_000010.jsonl"]


def test_a_step_written_again_after_a_resume_replaces_the_file(tmp_path: Path) -> None:
    SampleWriter(tmp_path, every=1).write(0, [group(), group("sum/1")])
    assert len(read(SampleWriter(tmp_path, every=1).write(0, [group()]))) == 2


def test_a_failed_write_leaves_the_old_file_and_nothing_half_written(tmp_path: Path) -> None:
    import resource
    import signal

    path = SampleWriter(tmp_path, every=1).write(0, [group()])
    assert path is not None
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(UserError, match=r"step_000000\.jsonl: cannot be written"):
            SampleWriter(tmp_path, every=1).write(0, [group(), group()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_half_a_character_in_a_reason_does_not_end_a_run(tmp_path: Path) -> None:
    whole = group()
    odd = replace(whole.samples[1], unscored_reason="it said \ud800", text="\x00\x1b\u202e\ufffd")
    (row,) = read(SampleWriter(tmp_path, every=1).write(1, [replace(whole, samples=(odd,))]))
    assert (row["unscored_reason"], row["response"]) == ("it said \ud800", "\x00\x1b\u202e\ufffd")
