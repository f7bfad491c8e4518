"""The variables in which torchrun, and who does as it does, tells a process that it is one of several ranks.

Reading them imports no torch. They are left over where they were exported for another program: `RANK` and `WORLD_SIZE`
decide, and what does not fit together is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from megarl.errors import UserError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT, ATTEMPT = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"
_ALL = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


@dataclass(frozen=True)
class Place:
    """A rank's number, of how many, and where they meet ("" and 0 for one that is alone).

    agent: the store there is torchrun's, not rank 0's. attempt: how often torchrun has started the ranks again.
    """

    rank: int
    world_size: int
    address: str
    port: int
    agent: bool
    attempt: int


def read_place() -> Place | None:
    """Return this process's place among ranks, None where the environment names none.

    Raises UserError, naming the variables, where they are incomplete, no numbers, or contradict each other.
    """
    given = {name: value for name in NAMES if (value := os.environ.get(name, "").strip())}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in given:
            raise _refused(given, f"{other}={given[other]} without {name}")
    number = {name: _whole(given, name) for name in given if name != "MASTER_ADDR"}
    rank, world_size = number["RANK"], number["WORLD_SIZE"]
    for smaller, larger in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "WORLD_SIZE"),
    ):
        if smaller in number and larger in number and number[smaller] >= number[larger]:
            last = f"of {number[larger]} ranks the last is {number[larger] - 1}"
            raise _refused(given, f"{smaller}={number[smaller]} and {larger}={number[larger]}: {last}")
    if number.get("LOCAL_WORLD_SIZE", 1) > world_size:
        raise _refused(given, f"LOCAL_WORLD_SIZE={number['LOCAL_WORLD_SIZE']} and WORLD_SIZE={world_size}")
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in given:
                raise _refused(given, f"RANK={rank} and WORLD_SIZE={world_size} without {name}")
        if not 0 < number["MASTER_PORT"] < 1 << 16:
            raise _refused(given, f"MASTER_PORT={given['MASTER_PORT']} is not a port")
    return Place(
        rank,
        world_size,
        given.get("MASTER_ADDR", "").strip("[]"),  # as IPv6 addresses stand in a URL
        number.get("MASTER_PORT", 0),
        agent=os.environ.get(AGENT) == "True",
        attempt=_whole(given | {ATTEMPT: os.environ.get(ATTEMPT, "").strip() or "0"}, ATTEMPT),
    )


def another_rank_tells() -> bool:
    """Return whether rank 0 tells of a mistake that every rank meets.

    That there is a rank 0 is believed of torchrun, and of megarl's own ranks. Other variables may be left over, and a
    mistake that is told by several ranks is better than one that none tells.
    """
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return AGENT in os.environ and rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)


def forget_place() -> None:
    """Take what torchrun sets out of the environment: this process is none of its ranks."""
    for name in [name for name in os.environ if _ALL.fullmatch(name)]:
        del os.environ[name]


def how_to_mend(names: tuple[str, ...] = NAMES) -> str:
    """Say what to do about variables that may be left over."""
    given = " ".join(name for name in names if os.environ.get(name))
    return (
        f"If they are left over from something else, `unset {given}`: megarl then starts its own ranks. Otherwise "
        "start all ranks by torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    )


def _whole(given: dict[str, str], name: str) -> int:
    value = given[name]
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or (name.endswith("WORLD_SIZE") and not int(value)):
        raise _refused(given, f"{name}={value} is not a whole number from {int(name.endswith('SIZE'))} on")
    return int(value)


def _refused(given: dict[str, str], what: str) -> UserError:
    return UserError(f"the environment does not say which rank this is: {what}. {how_to_mend(tuple(given))}")
