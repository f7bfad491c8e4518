"""Verifiers that misbehave, found by their import path as a user's would be."""

from __future__ import annotations

import os
import subprocess
import sys

from megarl.rewards.registry import Reference, Response, Score


def shouts(response: Response, reference: Reference, *, at_least: int = 1) -> float:
    return float(response.text.count("!") >= at_least)


def hang(response: Response, reference: Reference) -> float:
    return float(10**10**10 > 0)  # one C call: no Python signal handler would ever run


def starts_a_sleeper(response: Response, reference: Reference) -> float:
    return float(subprocess.run(["sleep", response.text]).returncode)


def die(response: Response, reference: Reference) -> float:
    os._exit(3)


def raises(response: Response, reference: Reference) -> float:
    return float(reference["answer"] == response.text)


def says_yes(response: Response, reference: Reference) -> str:
    return "yes"


def says_nan(response: Response, reference: Reference) -> float:
    return float("nan")


def says_why(response: Response, reference: Reference) -> Score:
    return Score(1.0, {"why": "it is good"})  # type: ignore[dict-item]


def leaves(response: Response, reference: Reference) -> float:
    sys.exit(0)


def takes_one(response: Response) -> float:
    return 1.0


def eat_memory(response: Response, reference: Reference) -> float:
    return float(len(bytearray(2**31)))


def torch_is_loaded(response: Response, reference: Reference) -> bool:
    return "torch" in sys.modules
