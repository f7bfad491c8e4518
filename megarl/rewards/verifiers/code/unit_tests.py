"""Unit tests of programming tasks, in the shapes that data sets have, and what counts as passing one.

A ground truth is read into `StdinTest`s and `CallTest`s. Accepted keys (the first that is there):
- `tests`: a list of `{"stdin": ..., "stdout": ...}` (or `input`/`output`) and `{"args": [...], "expected": ...}`.
- `public_test_cases`, `private_test_cases` (LiveCodeBench): lists of `{"input", "output", "testtype"}`; the
  private ones may be compressed.
- `input_output` (APPS, TACO) or `ground_truth`: `{"inputs": [...], "outputs": [...], "fn_name": ...}`.
- `test_list` (MBPP): lines `assert f(1, 2) == 3` with literals on the right.
Each value may also be its JSON text. A function's name comes from the test, the tests' object, `fn_name` or
`function` of the ground truth, or `func_name` in its `metadata`.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.rewards.contract import BadGroundTruth, GroundTruth

LARGEST_UNPACKED = 1 << 30


@dataclass(frozen=True)
class StdinTest:
    """Feed `stdin`, compare standard output with `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """Call `function`; what it returns must be one of `expected` (more than one where a data set is ambiguous)."""

    function: str
    args: tuple[Any, ...]
    expected: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Test = StdinTest | CallTest


def read_tests(ground_truth: GroundTruth) -> tuple[Test, ...]:
    """Return the ground truth's tests, in order.

    Raises BadGroundTruth naming the key and the test's number, from 1.
    """
    name = _function_name(ground_truth)
    if "tests" in ground_truth:
        found = _own(_decoded(ground_truth["tests"], "tests"), name, "tests")
    elif "public_test_cases" in ground_truth or "private_test_cases" in ground_truth:
        found = _live_code_bench(ground_truth, name)
    elif "inputs" in ground_truth and "outputs" in ground_truth:  # what others hold under `input_output`
        found = _inputs_outputs(ground_truth, name, "the ground truth")
    elif "test_list" in ground_truth:
        found = _asserts(_decoded(ground_truth["test_list"], "test_list"))
    else:
        key = "input_output" if "input_output" in ground_truth else "ground_truth"
        if key not in ground_truth:
            raise BadGroundTruth(
                "a code task needs `tests`, `public_test_cases`, `input_output`, `ground_truth` or "
                f"`test_list`; the ground truth has {', '.join(sorted(ground_truth)) or 'nothing'}"
            )
        content = _decoded(ground_truth[key], key)
        found = _own(content, name, key) if isinstance(content, list) else _inputs_outputs(content, name, key)
    if not found:
        raise BadGroundTruth("the task has no tests")
    return tuple(found)


def _own(tests: Any, name: str | None, key: str) -> list[Test]:
    if isinstance(tests, Mapping):
        return _inputs_outputs(tests, name, key)
    found: list[Test] = []
    for where, test in _numbered(tests, key):
        if "expected" in test:
            function = test.get("function", name)
            if not isinstance(function, str):
                raise BadGroundTruth(
                    f"{where}: no function is named (`function` of the test or ground truth)"
                )
            args, kwargs = test.get("args", []), test.get("kwargs", {})
            if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
                raise BadGroundTruth(f"{where}: `args` must be a list and `kwargs` an object")
            found.append(CallTest(function, tuple(args), (test["expected"],), dict(kwargs)))
        else:
            stdin = test.get("stdin", test.get("input", ""))
            stdout = test.get("stdout", test.get("output"))
            if stdout is None:
                raise BadGroundTruth(f"{where}: needs `stdout` (with `stdin`) or `expected` (with `args`)")
            found.append(StdinTest(_text(stdin, where), _text(stdout, where)))
    return found


def _inputs_outputs(content: Any, name: str | None, key: str) -> list[Test]:
    """Read the tests of APPS and its kin. Where every output of a call is a list of one, both forms pass."""
    if not isinstance(content, Mapping):
        raise BadGroundTruth(
            f"{key}: expected an object with `inputs` and `outputs`, not {type(content).__name__}"
        )
    inputs, outputs = content.get("inputs"), content.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadGroundTruth(f"{key}: `inputs` and `outputs` must be lists of the same length")
    function = content.get("fn_name") or name
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    found: list[Test] = []
    for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True), start=1):
        where = f"{key}, test {number}"
        if function:
            args = _json_lines(given, where) if isinstance(given, str) else given
            expected = (wanted, wanted[0]) if wrapped else (wanted,)
            found.append(CallTest(function, tuple(args) if isinstance(args, list) else (args,), expected))
        else:
            found.append(StdinTest(_text(given, where), _text(wanted, where)))
    return found


def _live_code_bench(ground_truth: GroundTruth, name: str | None) -> list[Test]:
    found: list[Test] = []
    for key in ("public_test_cases", "private_test_cases"):
        value = ground_truth.get(key)
        if value is None:
            continue
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = _unpacked(value, key)
        for where, test in _numbered(_decoded(value, key), key):
            given, wanted = _text(test.get("input", ""), where), _text(test.get("output", ""), where)
            if test.get("testtype", "stdin") != "functional":
                found.append(StdinTest(given, wanted))
            elif not name:
                raise BadGroundTruth(f"{where}: a functional test, but no function is named")
            else:
                found.append(CallTest(name, tuple(_json_lines(given, where)), (_decoded(wanted, where),)))
    return found


class _TextOnly(pickle.Unpickler):
    """A pickle may hold text and plain containers; one that names a class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise BadGroundTruth(f"private_test_cases: the pickle wants {module}.{name}; only text is accepted")


def _unpacked(text: str, key: str) -> Any:
    """Unpack LiveCodeBench's private tests: JSON text, pickled, zlib, base64."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_UNPACKED)
        if unpacker.unconsumed_tail:
            raise BadGroundTruth(f"{key}: more than {LARGEST_UNPACKED >> 20} MiB unpacked")
        return _TextOnly(io.BytesIO(data)).load()
    except BadGroundTruth:
        raise
    except Exception as error:
        raise BadGroundTruth(f"{key}: neither JSON nor base64 of a compressed pickle ({error})") from None


def _asserts(lines: Any) -> list[Test]:
    """Read `assert f(literals) == literal`; what cannot be compared outside the program is refused."""
    found: list[Test] = []
    if not isinstance(lines, list):
        raise BadGroundTruth("test_list: expected a list of assert statements")
    for number, line in enumerate(lines, start=1):
        try:
            match ast.parse(str(line).strip(), mode="exec").body:
                case [
                    ast.Assert(
                        test=ast.Compare(
                            left=ast.Call(func=ast.Name(id=function), args=args, keywords=keywords),
                            ops=[ast.Eq()],
                            comparators=[expected],
                        )
                    )
                ]:
                    values = tuple(_jsonable(ast.literal_eval(arg)) for arg in args)
                    named = {str(word.arg): _jsonable(ast.literal_eval(word.value)) for word in keywords}
                    found.append(CallTest(function, values, (_jsonable(ast.literal_eval(expected)),), named))
                case _:
                    raise ValueError("not of the form `assert f(...) == literal`")
        except (SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise BadGroundTruth(f"test_list, test {number}: {error}") from None
    return found


def _jsonable(value: Any) -> Any:
    """Return a literal as it looks after JSON. Raises ValueError for what JSON cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise ValueError(str(error)) from None


def _function_name(ground_truth: GroundTruth) -> str | None:
    metadata = ground_truth.get("metadata")
    if isinstance(metadata, str):
        metadata = _decoded(metadata, "metadata") if metadata.strip() else None
    inner = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    name = ground_truth.get("fn_name") or ground_truth.get("function") or inner
    return str(name) if name else None


def _numbered(tests: Any, key: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tests, list | tuple):
        raise BadGroundTruth(f"{key}: expected a list of tests, not {type(tests).__name__}")
    for number, test in enumerate(tests, start=1):
        if not isinstance(test, Mapping):
            raise BadGroundTruth(f"{key}, test {number}: expected an object, not {type(test).__name__}")
        yield f"{key}, test {number}", test


def _decoded(value: Any, key: str) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadGroundTruth(f"{key}: not JSON ({error})") from None


def _json_lines(text: str, where: str) -> list[Any]:
    """Read one argument a line."""
    return [_decoded(line, where) for line in text.split("\n") if line.strip()]


def _text(value: Any, where: str) -> str:
    """Return a text; a list counts as its lines."""
    if isinstance(value, list):
        return "\n".join(_text(line, where) for line in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise BadGroundTruth(f"{where}: expected text, not {type(value).__name__}")
    return value
