"""The scorer: streaming, a hard time bound, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.records import Prompt, Sample, WeightSpan
from megarl.rewards import Response, Scorer, find, verify
from megarl.rewards.scoring.pool import WorkerPool

CHAIN_SUM = {"dataset": "chain_sum", "entry": {"question": "3 + 4 =", "answer": "7", "metadata": {}}}
COUNTDOWN = {"dataset": "countdown", "entry": {"answer": "3+4", "metadata": {"numbers": [3, 4], "target": 7}}}
OURS = "tests.rewards.scoring.verifiers_for_tests"
HANG = f"{OURS}:hang"
SHOUTS = f"{OURS}:shouts"


def make_sample(text: str, verifier: str, ground_truth: dict, *, finish_reason: str = "stop") -> Sample:
    prompt = Prompt("p/0", np.array([1, 2]), "3 + 4 =", verifier, ground_truth)
    ids = np.arange(5)
    return Sample(
        prompt, "p/0#0", ids, np.zeros(5), np.ones(5), finish_reason, (WeightSpan(0, 0, 5),), text=text
    )


def score_all(scorer: Scorer, *samples: Sample) -> list[Sample]:
    async def go() -> list[Sample]:
        return await asyncio.gather(*(scorer.score(sample) for sample in samples))

    return asyncio.run(go())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]


@pytest.fixture(scope="module")
def scorer():
    with Scorer({"workers": 1}) as scorer:
        yield scorer


def test_a_reasoning_gym_answer_is_scored_by_the_tasks_own_scorer(scorer):
    right, wrong, computed = score_all(
        scorer,
        make_sample("<think>3 and 4</think><answer>7</answer>", "reasoning_gym", CHAIN_SUM),
        make_sample("<answer>8</answer>", "reasoning_gym", CHAIN_SUM),
        make_sample("Answer: 4 + 3", "reasoning_gym", COUNTDOWN),
    )
    assert right.reward == 1.0
    assert right.reward_parts == {"reasoning_gym": 1.0}
    assert wrong.reward < 1.0
    assert computed.reward == 1.0


def test_an_answer_inside_the_thinking_block_does_not_count():
    text = "<think>perhaps <answer>7</answer></think> I don't know"
    assert verify("reasoning_gym", text, CHAIN_SUM).value < 1.0
    assert verify("reasoning_gym", text, CHAIN_SUM, keep_thinking=True).value == 1.0


def test_a_hung_verifier_costs_its_time_bound_and_leaves_the_response_unscored():
    with Scorer({"workers": 1, "verifiers": [{"name": HANG, "timeout_s": 1.0}]}) as scorer:
        score_all(scorer, make_sample("!", SHOUTS, {}))  # the worker is up
        before = scorer.worker_pids
        hung, after = score_all(scorer, make_sample("x", HANG, {}), make_sample("hi!", SHOUTS, {}))
        assert hung.reward is None
        assert "timed out after 1 s" in hung.unscored_reason
        assert after.reward == 1.0, "the replaced worker goes on scoring"
        (killed,) = set(before) - set(scorer.worker_pids)
        assert not alive(killed)


def test_a_slow_response_does_not_hold_up_a_quick_one():
    with Scorer({"workers": 2, "verifiers": [{"name": HANG, "timeout_s": 3.0}]}) as scorer:

        async def go() -> list[str]:
            order = []

            async def one(verifier: str) -> None:
                await scorer.score(make_sample("!", verifier, {}))
                order.append(verifier)

            await asyncio.gather(one(HANG), one(SHOUTS), one(SHOUTS))
            return order

        assert asyncio.run(go()) == [SHOUTS, SHOUTS, HANG]


def test_what_a_killed_verifier_started_is_killed_with_it():
    verifier = f"{OURS}:starts_a_sleeper"
    with Scorer({"workers": 1, "verifiers": [{"name": verifier, "timeout_s": 2.0}]}) as scorer:
        marker = f"3{os.getpid()}"  # `sleep 3PID`: found in /proc, and nobody else's
        (sample,) = score_all(scorer, make_sample(marker, verifier, {}))
        assert "timed out" in sample.unscored_reason
        running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not any(line.split(b"\0")[:2] == [b"sleep", marker.encode()] for line in running)


def test_a_killed_template_is_replaced_and_scoring_goes_on():
    with Scorer({"workers": 1}) as scorer:
        score_all(scorer, make_sample("!", SHOUTS, {}))
        for pid in scorer.worker_pids:
            os.kill(pid, signal.SIGKILL)
        lost, fine = score_all(scorer, make_sample("!", SHOUTS, {}), make_sample("!", SHOUTS, {}))
        assert "died" in lost.unscored_reason
        assert fine.reward == 1.0


def test_imports_do_not_count_against_the_time_bound():
    pool = WorkerPool(1)  # preloads nothing
    try:
        score = pool.submit("tests.rewards.scoring.slow_to_import:fine", Response(""), {}, {}, 0.5).result(60)
    finally:
        pool.close()
    assert score.value == 1.0


def test_a_worker_that_dies_is_replaced_and_its_response_is_unscored(scorer):
    died, fine = score_all(
        scorer,
        make_sample("", f"{OURS}:die", {}),
        make_sample("!", SHOUTS, {}),
    )
    assert died.reward is None
    assert "died" in died.unscored_reason
    assert fine.reward == 1.0


def test_closing_leaves_no_process_even_while_a_verifier_hangs():
    scorer = Scorer({"workers": 2})

    async def go() -> tuple[int, ...]:
        tasks = [asyncio.create_task(scorer.score(make_sample("", HANG, {}))) for _ in range(2)]
        while len(scorer.worker_pids) < 3:  # two workers and what they are forked from
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        return scorer.worker_pids

    pids = asyncio.run(go())
    scorer.close()
    assert len(pids) == 3
    assert not [pid for pid in pids if alive(pid)]
    scorer.close()


def test_a_killed_parent_takes_its_workers_along(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, os, signal\n"
        "from megarl.rewards import Response, Scorer\n"
        "scorer = Scorer({'workers': 1})\n"  # no __main__ guard: a worker never runs this file
        f"asyncio.run(scorer.score_response({SHOUTS!r}, Response('!'), {{}}))\n"
        "print(*scorer.worker_pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_no_torch_is_imported_here_or_in_a_worker():
    program = (
        "import asyncio, sys\n"
        "from megarl.rewards import Response, Scorer\n"
        "with Scorer({'workers': 1}) as scorer:\n"
        "    verifier = 'tests.rewards.scoring.verifiers_for_tests:torch_is_loaded'\n"
        "    scored = asyncio.run(scorer.score_response(verifier, Response(''), {}))\n"
        "print(scored.reward, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0.0", "False"], done.stderr


def test_a_verifier_that_raises_or_returns_nonsense_is_unscored_with_the_reason(scorer):
    raised, text, nan, part = score_all(
        scorer,
        *(make_sample("", f"{OURS}:{name}", {}) for name in ("raises", "says_yes", "says_nan", "says_why")),
    )
    assert raised.reward is None
    assert raised.unscored_reason.endswith("raised KeyError: 'answer'")
    assert "returned str" in text.unscored_reason
    assert "returned nan" in nan.unscored_reason
    assert "part 'why' of a score must be a finite number" in part.unscored_reason


def test_an_unknown_verifier_or_option_is_refused_before_anything_is_sampled(scorer):
    with pytest.raises(
        UserError, match=r"no verifier is named 'reasoning_gim'\. Did you mean 'reasoning_gym'"
    ):
        scorer.check(["reasoning_gim"])
    with pytest.raises(UserError, match=r"rewards\.verifiers\.0: .* no option 'tagg'\. Did you mean 'tag'"):
        Scorer({"verifiers": [{"name": "reasoning_gym", "options": {"tagg": "x"}}]})
    with pytest.raises(UserError, match=r"option 'extraction': Input should be .*'auto'"):
        Scorer({"verifiers": [{"name": "reasoning_gym", "options": {"extraction": "all"}}]})
    with pytest.raises(
        UserError, match=r"rewards\.verifiers\.0\.wieght: unknown setting\. Did you mean 'weight'"
    ):
        Scorer({"verifiers": [{"name": "reasoning_gym", "wieght": 2}]})
    with pytest.raises(UserError, match="cannot import 'no_such_package'"):
        find("no_such_package:verify")
    with pytest.raises(UserError, match=r"no function 'shout'\. Did you mean 'shouts'"):
        find(f"{OURS}:shout")
    for name in (f"{OURS}:takes_one", "builtins:max"):
        with pytest.raises(UserError, match=r"must take \(response, ground_truth"):
            find(name)


def test_a_users_module_that_cannot_be_imported_is_told_in_one_message(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("def f(:\n")
    (tmp_path / "raising_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"cannot import 'broken_rewards' \(SyntaxError: .*line 1"):
        find("broken_rewards:f")
    with pytest.raises(UserError, match=r"cannot import 'raising_rewards' \(ZeroDivisionError"):
        find("raising_rewards:f")
    with pytest.raises(UserError, match="cannot import ''"):
        find(":f")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_verifier_that_exits_ends_nothing_but_its_own_score(workers):
    with Scorer({"workers": workers}) as scorer:
        (sample,) = score_all(scorer, make_sample("", f"{OURS}:leaves", {}))
    assert sample.reward is None
    assert sample.unscored_reason.endswith("raised SystemExit: 0")


def test_a_row_without_its_ground_truth_is_unscored_not_wrong(scorer):
    (sample,) = score_all(scorer, make_sample("7", "reasoning_gym", {"dataset": "chain_sum"}))
    assert sample.reward is None
    assert "bad ground truth" in sample.unscored_reason


def test_a_worker_runs_verifiers_in_its_main_thread_where_timers_reach_them(scorer):
    (sample,) = score_all(scorer, make_sample("", f"{OURS}:has_the_main_thread", {}))
    assert sample.reward == 1.0


def test_the_workers_memory_is_bounded():
    with Scorer({"workers": 1, "worker_memory_gib": 1.0}) as scorer:
        (sample,) = score_all(scorer, make_sample("", f"{OURS}:eat_memory", {}))
    assert sample.reward is None
    assert "MemoryError" in sample.unscored_reason


def test_without_workers_everything_runs_in_this_process():
    with Scorer({"workers": 0}) as scorer:
        scored = asyncio.run(scorer.score_response("reasoning_gym", Response("Answer: 3+4"), COUNTDOWN))
        assert scorer.worker_pids == ()
    assert scored.reward == 1.0
