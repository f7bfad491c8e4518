"""The code verifier: which program is taken, which tests it faces, what counts as passing, what the score is."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.rewards import Scorer
from megarl.rewards.contract import BadGroundTruth, Response
from megarl.rewards.execution import Limits
from megarl.rewards.extraction import last_code_block
from megarl.rewards.verifiers import find
from megarl.rewards.verifiers.code import code
from megarl.rewards.verifiers.code.compare import Comparison
from megarl.rewards.verifiers.code.unit_tests import CallTest, StdinTest, read_tests
from tests.rewards.execution.sandboxes import CONFINED, SMALL, nothing_left_behind, sandbox

ADDS = {
    "tests": [{"stdin": f"{a} {b}\n", "stdout": f"{a + b}\n"} for a, b in ((1, 2), (3, 4), (10, -3), (0, 0))]
}
RIGHT = "print(sum(map(int, input().split())))"
HALF_RIGHT = "a, b = map(int, input().split())\nprint(a + b if b > 0 else 'no')"


DOCUMENTED = "def f():\n    '''\n    ```\n    f()\n    ```\n    '''\n"


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    with nothing_left_behind(tmp_path):
        yield


def fenced(program: str, label: str = "python") -> str:
    return f"Here it is.\n```{label}\n{program}\n```\nDone."


def scored(text: str, ground_truth=ADDS, **options):
    sandbox("bubblewrap")
    return code(Response(text), ground_truth, **{"limits": SMALL, "sandbox": "bubblewrap", **options})


# Which program.


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nA\n```", "A\n"),
        ("```\nA\n```", "A\n"),
        ("```Python\nA\n```", "A\n"),
        ("```py title='x'\nA\n```", "A\n"),
        ("~~~python\nA\n~~~", "A\n"),
        ("  ```python\n  A\n  ```", "A\n"),
        ("1. So:\n     ```python\n     if A:\n         B\n     ```", "if A:\n    B\n"),
        ("- ```python\n  if A:\n      B\n  ```", "if A:\n    B\n"),
        ("10) ```python\n    A\n    ```", "A\n"),
        ("\t```python\n\tif A:\n\t\tB\n\t```", "if A:\n\tB\n"),
        ("\t```python\n    if A:\n        B\n    ```", "if A:\n    B\n"),
        ("   ```python\nA\n```", "A\n"),
        ("> ```python\n> if A:\n>     B\n>\n> ```", "if A:\n    B\n\n"),
        (
            f"```python\n{DOCUMENTED}```",
            DOCUMENTED,
        ),
        ("```python\nif A:\n\t'''\n\t```\n\t'''\n```", "if A:\n\t'''\n\t```\n\t'''\n"),
        ("```python\nA\n```\nIt prints\n```\n7\n```", "A\n"),
        ("```\nA\n```\n```python\nB\n```\n```\nC\n```", "B\n"),
        ("```\nA\n```\n```\nB\n```", "B\n"),
        ("```\nA\n```\n```python\nB, cut off", "A\n"),
        ("```cpp\nA\n```\n```\nB\n```", "B\n"),
        ("```python-repl\n>>> A\n```", None),
        ("```{.python .numberLines}\nA\n```", "A\n"),
        ("```{#it .python}\nA\n```", "A\n"),
        ("```{python, echo=FALSE}\nA\n```", "A\n"),
        ('``` Python3.11 title="x"\nA\n```', "A\n"),
        ("```python{1,3}\nA\n```", "A\n"),
        ("```python:main.py\nA\n```", "A\n"),
        ("```language-python\nA\n```", "A\n"),
        ("```{}\nA\n```", "A\n"),
        ("~~~ python `x`\n```\n~~~~", "```\n"),
        ("```python\ns = '\x0c```\u2028```'\n```", "s = '\x0c```\u2028```'\n"),
        ("```python\nA\n```\ntext\n```python\nB\n```", "B\n"),
        ("```python\nA\n```\n```text\nthe output\n```", "A\n"),
        ("```python\nA\n```\n```python\nB, cut off", "A\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```python\nA\n``` and more", None),
        ("```python\r\nA\r\n```\r\n", "A\r\n"),
        ("```python\n```", ""),
        ("```cpp\nA\n```", None),
        ("Use `print(1)`.", None),
        ("print(1)", None),
        ("```python\nA", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block_in_the_language(text, program):
    assert last_code_block(text, ("python", "python3", "py")) == program


@given(st.lists(st.sampled_from(["```", "```python", "~~~", "A", "", "````", "```text"]), max_size=12))
def test_text_after_the_last_closed_block_changes_nothing(lines):
    text = "\n".join([*lines, "````````", "````````", "```python", "A", "```"])
    found = last_code_block(text, ("python",))
    assert last_code_block(text + "\nand so it is done", ("python",)) == found


def test_code_in_a_thinking_block_is_not_the_answer():
    assert scored(f"<think>{fenced(RIGHT)}</think>\n{fenced('print(1)')}").value == 0
    assert scored(f"<think>{fenced('print(1)')}</think>\n{fenced(RIGHT)}").value == 1
    assert scored(f"<think>{fenced(RIGHT)}").value == 0
    cut_off = Response(fenced(RIGHT), finish_reason="length", prompt="Add. <think>\n")
    assert code(cut_off, ADDS, limits=SMALL, sandbox="bubblewrap").value == 0


def test_a_response_without_a_program_scores_zero_and_says_so():
    score = scored("I think the answer is 7.")
    assert score.value == 0
    assert "no closed code block" in score.reason


# Which tests.

PACKED = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "3", "output": "4", "testtype": "stdin"}])))
).decode()


@pytest.mark.parametrize(
    ("ground_truth", "tests"),
    [
        ({"tests": [{"stdin": "1", "stdout": "2"}]}, [StdinTest("1", "2")]),
        ({"tests": [{"input": "1", "output": "2"}]}, [StdinTest("1", "2")]),
        ({"tests": '[{"input": "1", "output": "2"}]'}, [StdinTest("1", "2")]),
        ({"tests": [{"function": "f", "args": [1], "expected": 2}]}, [CallTest("f", (1,), (2,))]),
        ({"tests": [{"args": [], "expected": None}], "fn_name": "f"}, [CallTest("f", (), (None,))]),
        ({"input_output": {"inputs": ["1\n"], "outputs": ["2\n"]}}, [StdinTest("1\n", "2\n")]),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, [CallTest("f", (1,), (2,))]),
        ({"input_output": {"inputs": [["1", "2"]], "outputs": [["3", "4"]]}}, [StdinTest("1\n2", "3\n4")]),
        (
            {"input_output": json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"})},
            [CallTest("f", (1, 2), (3,))],
        ),
        (
            {"ground_truth": json.dumps({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"})},
            [CallTest("f", (1, 2), ([3], 3))],
        ),
        (
            {
                "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
                "private_test_cases": PACKED,
            },
            [StdinTest("1", "2"), StdinTest("3", "4")],
        ),
        (
            {
                "public_test_cases": [{"input": '[1, 2]\n"a"', "output": "true", "testtype": "functional"}],
                "metadata": '{"func_name": "f"}',
            },
            [CallTest("f", ([1, 2], "a"), (True,))],
        ),
        (
            {"input_output": {"inputs": ['"a\u2028b"\n1'], "outputs": [3], "fn_name": "f"}},
            [CallTest("f", ("a\u2028b", 1), (3,))],
        ),
        (
            {"test_list": ["assert f(1, (2, 3)) == [4]", "assert f('a', k={'b': 1}) == None"]},
            [CallTest("f", (1, [2, 3]), ([4],)), CallTest("f", ("a",), (None,), {"k": {"b": 1}})],
        ),
    ],
)
def test_tests_are_read_from_the_shapes_that_data_sets_have(ground_truth, tests):
    assert list(read_tests(ground_truth)) == tests


class Evil:
    def __reduce__(self):
        return (print, ("unpickled!",))


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        ({}, "needs `tests`"),
        ({"answer": "7"}, "the ground truth has answer"),
        ({"tests": []}, "no tests"),
        ({"tests": "[{"}, "tests: not JSON"),
        ({"tests": [{"stdin": "1"}]}, "tests, test 1: needs `stdout`"),
        ({"tests": [{"stdin": "1", "stdout": "1"}, 5]}, "tests, test 2: expected an object"),
        ({"tests": [{"args": [1], "expected": 1}]}, "tests, test 1: no function is named"),
        ({"tests": [{"function": "f", "args": 1, "expected": 1}]}, "`args` must be a list"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "same length"),
        (
            {"input_output": {"inputs": ["[1"], "outputs": [1], "fn_name": "f"}},
            "input_output, test 1: not JSON",
        ),
        ({"private_test_cases": "!"}, "neither JSON nor base64"),
        (
            {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()},
            "only text is accepted",
        ),
        ({"test_list": ["assert f(1) > 2"]}, "test_list, test 1: not of the form"),
        ({"test_list": ["assert f(1) == {1, 2}"]}, "test_list, test 1"),
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_the_datas_fault_and_says_where(ground_truth, message, capsys):
    with pytest.raises(BadGroundTruth, match=message):
        read_tests(ground_truth)
    assert "unpickled" not in capsys.readouterr().out


# What counts as equal.


@pytest.mark.parametrize(
    ("expected", "got", "how", "equal"),
    [
        ("7\n", "7", "lines", True),
        ("1 2\n3\n", "1  2 \r\n3\n\n", "lines", True),
        ("1 2\n3", "1\n2 3", "lines", False),
        ("1 2\n3", "1\n2 3", "tokens", True),
        ("1\n\n2", "1\n2", "lines", False),
        ("1\n\n2", "1\n2", "tokens", True),
        ("7\n", "7", "exact", False),
        ("7", "7", "exact", True),
        ("YES", "yes", "lines", False),
        ("1.0", "1", "lines", True),
        ("0.50", ".5", "lines", True),
        ("1e3", "1000", "lines", True),
        ("7", "07", "lines", False),
        ("1_0", "10.", "lines", False),
        ("nan", "NaN", "lines", False),
        ("0.3333333", "0.33333331", "lines", False),
        ("", "", "lines", True),
        ("", "\n \n", "lines", True),
        ("", "x", "lines", False),
        ("x", "", "lines", False),
        ("1 2 3", "1 2", "tokens", False),
        ("1" * 5000, "1" * 4999 + "2", "lines", False),
        ("1e999999999", "1e999999998", "lines", False),
    ],
)
def test_outputs_are_compared_by_the_rules(expected, got, how, equal):
    assert (Comparison(how).difference(expected, got) is None) == equal
    assert (Comparison(how).difference(got, expected) is None) == equal


def test_numbers_may_be_compared_as_text_or_within_a_tolerance_but_integers_only_exactly():
    assert Comparison(float_tolerance=None).difference("1.0", "1") is not None
    near = Comparison(float_tolerance=1e-6)
    assert near.difference("x = 0.3333333", "x = 0.33333331") is None
    assert near.difference("1000000000", "1000000001") is not None
    assert near.value_difference((0.1,), "0.10000000001") is None
    assert near.value_difference((10**18,), str(10**18 + 1)) is not None


def test_a_tolerance_is_relative_for_large_numbers_and_absolute_near_zero():
    near = Comparison(float_tolerance=1e-6)
    assert near.difference("1000000000.0", "1000000000.5") is None
    assert near.difference("0.0", "0.0000005") is None
    assert near.difference("1000000000.0", "1000002000.0") is not None
    assert near.difference("0.0", "0.00001") is not None


def test_case_may_be_ignored():
    assert Comparison(ignore_case=True).difference("YES\n", "yes") is None
    assert Comparison(ignore_case=True).value_difference(("YES",), '"Yes"') is None


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        (7, "7", True),
        (7, "7.0", True),
        (7, '"7"', False),
        (True, "true", True),
        (True, "1", True),
        ([1, 2], "[1, 2]", True),
        ([1, 2], "[2, 1]", False),
        ([1, 2], "[1, 2, 3]", False),
        ((1, 2), "[1, 2]", True),
        ({"a": 1}, '{"a": 1}', True),
        ({1: 2}, '{"1": 2}', True),
        ({"a": 1}, '{"a": 1, "b": 2}', False),
        (None, "null", True),
        (None, "0", False),
        ([], "null", False),
        ("", "[]", False),
        (float("nan"), "NaN", False),
        (10**400, "1e999", False),
        (7, "", False),
        (7, "7 8", False),
        (7, "[" * 100_000, False),
        (7, "9" * 5000, False),
    ],
)
def test_a_functions_value_is_compared_as_json(expected, got, equal):
    assert (Comparison().value_difference((expected,), got) is None) == equal


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_every_json_value_equals_itself_and_nothing_wrapped(value):
    assert Comparison().value_difference((value,), json.dumps(value)) is None
    assert Comparison().value_difference((value,), json.dumps([value, "and more"])) is not None


# The verdict.


def test_all_or_nothing_and_fraction():
    assert scored(fenced(RIGHT)).value == 1.0
    assert scored(fenced(HALF_RIGHT)).value == 0.0
    assert scored(fenced(HALF_RIGHT), score="fraction").value == 0.5
    assert scored(fenced(RIGHT), score="fraction").value == 1.0


def test_the_detail_names_the_first_failed_test_and_what_was_wrong():
    score = scored(fenced(HALF_RIGHT), score="fraction")
    assert score.parts == {"passed": 2.0, "tests": 4.0, "passed_fraction": 0.5}
    assert score.reason == "passed 2 of 4; test 3: line 1: expected '7', got 'no'"
    assert scored(fenced("print(input()[9])")).reason.endswith(
        "exit code 1: IndexError: string index out of range"
    )


def test_all_or_nothing_stops_at_the_first_failure_unless_told_to_run_all():
    assert "(3 run)" in scored(fenced(HALF_RIGHT)).reason
    every = scored(fenced("a, b = map(int, input().split())\nprint(a + b if b != 4 else 0)"), run_all=True)
    assert every.value == 0
    assert every.parts["passed"] == 3


def test_max_tests_takes_an_even_spread_with_the_first_and_the_last():
    seen = {"tests": [{"stdin": str(n), "stdout": "?"} for n in range(10)]}
    reasons = [
        scored(fenced("print('?' if input() in '0369' else 'no')"), seen, max_tests=most).reason
        for most in (1, 4)
    ]
    assert reasons == ["passed 1 of 1", "passed 4 of 4"]


def test_functions_and_methods_are_called_with_their_arguments():
    ground_truth = {"tests": [{"args": [[2, 7, 11], 9], "expected": [0, 1]}], "fn_name": "two_sum"}
    body = "return next([i, j] for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == target)"
    function = f"def two_sum(nums: List[int], target: int) -> List[int]:\n    {body}"
    method = f"class Solution:\n    def two_sum(self, nums: List[int], target: int):\n        {body}"
    assert scored(fenced(function), ground_truth).value == 1
    assert scored(fenced(method), ground_truth).value == 1
    assert "no function 'two_sum'" in scored(fenced("def other(): pass"), ground_truth).reason
    assert "JSON cannot hold" in scored(fenced("def two_sum(a, b): return {0, 1}"), ground_truth).reason


def test_a_convenience_name_is_no_answer_to_a_task_of_that_name():
    ground_truth = {"tests": [{"args": [12, 18], "expected": 6}], "fn_name": "gcd"}
    assert "no function 'gcd'" in scored(fenced("pass"), ground_truth).reason
    assert scored(fenced("from math import gcd"), ground_truth).value == 1
    method = "class Solution:\n    def gcd(self, a, b): return 6"
    assert scored(fenced(method), ground_truth).value == 1


def test_programs_may_end_themselves_as_in_any_interpreter():
    for ending in ("exit()", "quit(0)", "import sys\nsys.stdout.close()"):
        assert scored(fenced(f"{RIGHT}\n{ending}")).value == 1, ending
    assert "exit code 3" in scored(fenced(f"{RIGHT}\nexit(3)")).reason


def test_printing_in_a_tested_function_is_no_part_of_its_result():
    ground_truth = {"tests": [{"args": [], "expected": 5}], "fn_name": "f"}
    assert scored(fenced("def f():\n    print('[1, 2]')\n    return 5"), ground_truth).value == 1


def test_the_time_for_all_tests_together_is_bounded_and_the_rest_count_as_failed():
    score = scored(
        fenced("import time\ntime.sleep(0.8)\n" + RIGHT), score="fraction", total_seconds=1.2, limits=Limits()
    )
    assert 0 < score.value < 1
    assert "time" in score.reason


def test_what_the_sandbox_cannot_do_is_unscored_and_never_zero():
    languages = {"cobol": {"labels": ["cobol"], "file": "main.cob", "run": ["no-such-cobol", "main.cob"]}}
    options = find("code").options({"languages": languages}, where="test")
    score = scored(fenced("DISPLAY 7.", "cobol"), ADDS | {"language": "cobol"}, **options)
    assert score.value is None
    assert "no-such-cobol" in score.reason


def test_an_unknown_language_or_calls_in_another_language_are_the_datas_fault():
    with pytest.raises(BadGroundTruth, match="'klingon' is not known"):
        scored(fenced(RIGHT), ADDS | {"language": "klingon"})
    with pytest.raises(BadGroundTruth, match="function-call tests are for Python"):
        scored(fenced(RIGHT, "c"), {"tests": [{"args": [], "expected": 1, "function": "f"}], "language": "c"})


SUM_IN_C = '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d", a + b); }'
SUM_IN_CPP = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
SUM_IN_JAVASCRIPT = """
const words = require('fs').readFileSync(0, 'utf8').trim().split(' ').map(Number);
console.log(words[0] + words[1]);
"""


@pytest.mark.parametrize(
    ("language", "needs", "program", "kind"),
    [
        ("c", "gcc", SUM_IN_C, "landlock"),
        ("cpp", "g++", SUM_IN_CPP, "bubblewrap"),
        ("javascript", "node", SUM_IN_JAVASCRIPT, "bubblewrap"),
        ("javascript", "node", SUM_IN_JAVASCRIPT, "landlock"),  # where it may not read OpenSSL's settings
    ],
)
def test_other_languages_run_by_their_commands(language, needs, program, kind):
    if not shutil.which(needs, path="/usr/local/bin:/usr/bin:/bin"):
        pytest.skip(f"{needs} is not installed")
    sandbox(kind, programs=True)
    options = {"language": language, "limits": Limits(), "sandbox": kind}
    assert scored(fenced(program, language), **options).reason == "passed 4 of 4"
    wrong = scored(fenced(program.replace("a + b", "a - b").replace("] + ", "] - "), language), **options)
    assert (wrong.value, "expected '3'" in wrong.reason) == (0, True)
    broken = scored(fenced("int main( {", language), **options)
    assert broken.value == 0


@pytest.mark.parametrize("kind", CONFINED)
def test_a_worker_killed_at_its_bound_takes_its_live_sandbox_with_it(kind, tmp_path, monkeypatch):
    sandbox(kind)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the worker's: where `_nothing_left_behind` looks
    before = _children_now()
    options = {"sandbox": kind, "limits": {"wall_seconds": 500}}
    part = {"name": "code", "timeout_s": 5.0, "options": options}
    sleeper = "import os, time\nif not os.fork(): os.setsid()\ntime.sleep(1000)"
    with Scorer({"workers": 1, "verifiers": [part]}) as scorer:
        scored = asyncio.run(scorer.score_response("code", Response(fenced(sleeper)), ADDS))
        assert (scored.reward, scored.reason) == (None, "code: timed out after 5 s")
        template = psutil.Process(scorer.worker_pids[-1])
        deadline = time.monotonic() + 20
        while (left := _children_now() - before - {template}) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == set(), "processes or zombies of the killed worker"


def _children_now() -> set[psutil.Process]:
    """Ours and theirs, zombies too."""
    return set(psutil.Process().children(recursive=True))


def test_options_are_checked_and_the_sandbox_is_tried_when_a_configuration_is_read():
    for options, message in (
        ({"limits": {"cpu_second": 2}}, "limits.cpu_second"),
        ({"limits": {"processes": 0}}, "processes must be a positive"),
        ({"score": "most"}, "'score'"),
        ({"language": "pyton"}, "Did you mean 'python'"),
        ({"max_tests": 0}, "option .max_tests.*greater than or equal to 1"),
        ({"sandbox": "none"}, "unsafe_allow_unsandboxed: true"),
        ({"python": "no-such-python"}, "no-such-python"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            find("code").options(options, where="rewards.verifiers.0")
        assert str(raised.value).startswith("rewards.verifiers.0: ")
