r"""Verifiable rewards: verifiers found by name, composed into one number, run beside generation.

    from megarl.rewards import verify
    score = verify("math", r"So it is \boxed{\frac{1}{2}}.", {"answer": "0.5"})
    assert score.value == 1.0

`Scorer` is what a training loop holds. Nothing here imports torch, Megatron or SGLang.
"""

from megarl.rewards.compose import reason_kind
from megarl.rewards.registry import (
    BUILTIN,
    BadReference,
    Reference,
    Response,
    Score,
    Verifier,
    find,
    verifier,
)
from megarl.rewards.scorer import Scored, Scorer
from megarl.rewards.settings import Part, RewardSettings
from megarl.rewards.verify_file import Columns, FileReport, parse_options, verify_file

__all__ = [
    "BUILTIN",
    "BadReference",
    "Columns",
    "FileReport",
    "Part",
    "Reference",
    "Response",
    "RewardSettings",
    "Score",
    "Scored",
    "Scorer",
    "Verifier",
    "find",
    "parse_options",
    "reason_kind",
    "verifier",
    "verify",
    "verify_file",
]


def verify(name: str, response: str | Response, reference: Reference, **options: object) -> Score:
    """One verdict, here and now, in this thread and without a time bound; raises UserError for a wrong
    option.
    """
    import asyncio

    from megarl.rewards.registry import call, to_score

    found = find(name)
    checked = found.options(options, where="verify")
    given = Response(response) if isinstance(response, str) else response
    if found.placement.place != "service":
        return call(found.function, given, reference, checked)

    async def ask() -> Score:
        service = found.function(**checked)
        try:
            return to_score(await service(given, reference))
        finally:
            await service.aclose()

    return asyncio.run(ask())
