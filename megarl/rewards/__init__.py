r"""Verifiable rewards: verifiers found by name, composed into one number, run beside generation.

    from megarl.rewards import verify
    score = verify("math", r"So it is \boxed{\frac{1}{2}}.", {"answer": "0.5"})
    assert score.value == 1.0

- `contract.py` says what a verifier is; `verifiers/` holds the built-in ones, one a file.
- `scoring/` runs them for a training loop (`Scorer`) or for a file of responses (`verify_file`).
- `execution/` is the sandbox in which a response's program runs.

Nothing here imports torch, Megatron or SGLang.
"""

import asyncio

from megarl.rewards.contract import BadGroundTruth, GroundTruth, Response, Score, call, to_score, verifier
from megarl.rewards.scoring.compose import Scored, reason_kind
from megarl.rewards.scoring.scorer import Scorer
from megarl.rewards.scoring.verify_file import Columns, FileReport, parse_options, verify_file
from megarl.rewards.settings import Part, RewardSettings
from megarl.rewards.verifiers import Verifier, builtin_names, find

__all__ = [
    "BadGroundTruth",
    "Columns",
    "FileReport",
    "GroundTruth",
    "Part",
    "Response",
    "RewardSettings",
    "Score",
    "Scored",
    "Scorer",
    "Verifier",
    "builtin_names",
    "find",
    "parse_options",
    "reason_kind",
    "verifier",
    "verify",
    "verify_file",
]


def verify(name: str, response: str | Response, ground_truth: GroundTruth, **options: object) -> Score:
    """Return one verdict, from this thread and without a time bound.

    Raises UserError for an unknown verifier and for an unknown or wrong option.
    """
    found = find(name)
    checked = found.options(options, where="verify")
    given = Response(response) if isinstance(response, str) else response
    if found.spec.run_in != "service":
        return call(found.function, given, ground_truth, checked)

    async def ask() -> Score:
        service = found.function(**checked)
        try:
            return to_score(await service(given, ground_truth))
        finally:
            await service.aclose()

    return asyncio.run(ask())
