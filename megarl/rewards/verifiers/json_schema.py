"""`json_schema`: the answer is JSON that a schema accepts."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import TagName, answer_part, extract, last_code_block


def _check_schema(*, schema: dict[str, Any] | None = None, **_: object) -> None:
    if schema is not None:
        _validator_of(schema)


@verifier(run_in="worker", timeout_s=5.0, check=_check_schema)
def json_schema(
    response: Response,
    ground_truth: GroundTruth,
    *,
    schema: dict[str, Any] | None = None,
    source: Literal["auto", "whole", "fence", "tag"] = "auto",
    tag: TagName = "answer",
    graded: bool = False,
) -> Score:
    """Return 1 if the answer is JSON, valid by the schema and equal to the ground truth's value, if any; else 0.

    schema: for every prompt; otherwise the ground truth's.
    ground_truth: {"schema": ..., "answer": optional JSON value}.
    source: the last fenced code block, the last <tag>, the whole text, or `auto`: the first of them that is there.
    graded: 0.5 for JSON that the schema refuses. Parts: `json`, `valid`. References to other documents are
    not fetched. NaN, Infinity and repeated keys are no JSON.
    """
    wanted = schema if schema is not None else ground_truth.get("schema")
    if not isinstance(wanted, (dict, bool)):
        raise BadGroundTruth("a json_schema task needs a 'schema', in its ground truth or among the options")
    kind = _validator_of(wanted)
    try:
        value = json.loads(_json_text(answer_part(response), source, tag), **_STRICT)
    except (ValueError, RecursionError) as error:
        return Score(0.0, {"json": 0.0, "valid": 0.0}, f"not JSON: {error}")
    try:
        fault = jsonschema.exceptions.best_match(kind(wanted, registry=Registry()).iter_errors(value))
        problem = fault and f"{fault.json_path}: {fault.message[:200]}"
    except Unresolvable as error:
        raise BadGroundTruth(f"the schema is wrong: {error}") from None
    except RecursionError:
        problem = "nested too deeply"
    if problem is not None:
        return Score(0.5 if graded else 0.0, {"json": 1.0, "valid": 0.0}, problem)
    right = "answer" not in ground_truth or _same(value, ground_truth["answer"])
    return Score(float(right), {"json": 1.0, "valid": 1.0})


def _validator_of(schema: dict[str, Any] | bool) -> Any:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise BadGroundTruth(f"the schema is wrong: {error.message}") from None
    return kind


def _json_text(text: str, source: str, tag: str) -> str:
    block = last_code_block(text, ("json",), labelled_first=False)
    if source in ("auto", "fence") and block is not None:
        return block
    if source in ("auto", "tag") and (inner := extract(text, "tag", marker="", tag=tag)) is not None:
        return inner
    if source in ("auto", "whole"):
        return text
    raise ValueError(f"no {source} found")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


_STRICT: dict[str, Any] = {"parse_constant": _refuse, "object_pairs_hook": _unique}


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal as JSON: 1 is 1.0, but True is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b
