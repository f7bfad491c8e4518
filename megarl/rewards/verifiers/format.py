"""`format`: the response has its blocks, well formed, exactly once and in order."""

from __future__ import annotations

from typing import Any, Literal

from megarl.errors import UserError
from megarl.rewards.contract import GroundTruth, Response, Score, verifier
from megarl.rewards.extraction import EOS_STRINGS, TagName, Text, last_box, strip_eos


def _check_format(
    *,
    blocks: tuple[str, ...] = ("think", "answer"),
    outside: str = "nothing",
    boxed: bool = False,
    **_: Any,
) -> None:
    if len(set(blocks)) < len(blocks):
        raise UserError(f"format: blocks {list(blocks)} has a name twice, and each block stands once")
    if not blocks and not boxed:
        raise UserError("format: without blocks and without boxed there is nothing to check")
    if not blocks and outside == "nothing":
        raise UserError(
            "format: outside must be 'after' or 'anything' without blocks: all text stands outside"
        )


@verifier(run_in="inline", check=_check_format)
def format(
    response: Response,
    ground_truth: GroundTruth,
    *,
    blocks: tuple[TagName, ...] = ("think", "answer"),
    outside: Literal["nothing", "after", "anything"] = "nothing",
    allow_empty: bool = False,
    boxed: bool = False,
    graded: bool = False,
    eos: tuple[Text, ...] = EOS_STRINGS,
) -> Score:
    r"""Return 1 if the response is `<think>...</think><answer>...</answer>` (for the default blocks), else 0.

    blocks: tag names in order; each opens and closes exactly once. The prompt may have opened the first one.
    outside: what may stand beside the blocks: `nothing` (white space), text `after` the last one, or `anything`.
    allow_empty: blocks may be blank. boxed: the last block (or what follows it) must hold one closed \boxed{}.
    graded: the share of the checks that pass, instead of all or nothing. Parts: each check by name.
    """
    text = strip_eos(response.text, eos)
    first = f"<{blocks[0]}>" if blocks else ""
    if blocks and response.prompt.rstrip().endswith(first) and not text.lstrip().startswith(first):
        text = first + text
    once = all(text.count(f"<{name}>") == 1 == text.count(f"</{name}>") for name in blocks)
    spans = [(text.find(f"<{name}>"), text.find(f"</{name}>")) for name in blocks]
    bounds = [position for span in spans for position in span]
    ordered = all(position >= 0 for position in bounds) and bounds == sorted(bounds)
    checks = {"once": once, "in_order": ordered}
    if outside != "anything":
        ends = [0, *(end + len(name) + 3 for name, (_, end) in zip(blocks, spans, strict=True))]
        starts = [*(start for start, _ in spans), len(text) if outside == "nothing" else ends[-1]]
        beside = "".join(text[end:start] for end, start in zip(ends, starts, strict=True))
        checks["nothing_beside"] = once and ordered and not beside.strip()
    if not allow_empty:
        checks["filled"] = ordered and all(
            _shows_something(text[start + len(name) + 2 : end])
            for name, (start, end) in zip(blocks, spans, strict=True)
        )
    if boxed:
        part = _part_with_box(text, blocks, spans, outside) if ordered else ""
        checks["boxed"] = part.count(r"\boxed") == 1 and bool((last_box(part) or "").strip())
    share = sum(checks.values()) / len(checks)
    value = share if graded else float(share == 1.0)
    failed = [name for name, passed in checks.items() if not passed]
    parts = {name: float(passed) for name, passed in checks.items()}
    return Score(value, parts, f"failed: {', '.join(failed)}" if failed else None)


def _shows_something(text: str) -> bool:
    """Return whether it has more than white space and characters without a width."""
    return any(character.isprintable() and not character.isspace() for character in text)


def _part_with_box(text: str, blocks: tuple[str, ...], spans: list[tuple[int, int]], outside: str) -> str:
    if not blocks:
        return text
    start, end = spans[-1]
    return text[end:] if outside == "after" else text[start:end]
