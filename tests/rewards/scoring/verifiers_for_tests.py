"""Verifiers that misbehave, found by their import path as a user's would be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from megarl.rewards.contract import GroundTruth, Response, Score


def shouts(response: Response, ground_truth: GroundTruth, *, at_least: int = 1) -> float:
    return float(response.text.count("!") >= at_least)


def hang(response: Response, ground_truth: GroundTruth) -> float:
    return float(10**10**10 > 0)  # one C call: no Python signal handler would ever run


def starts_a_sleeper(response: Response, ground_truth: GroundTruth) -> float:
    return float(subprocess.run(["sleep", response.text]).returncode)


def die(response: Response, ground_truth: GroundTruth) -> float:
    os._exit(3)


def raises(response: Response, ground_truth: GroundTruth) -> float:
    return float(ground_truth["answer"] == response.text)


def says_yes(response: Response, ground_truth: GroundTruth) -> str:
    return "yes"


def says_nan(response: Response, ground_truth: GroundTruth) -> float:
    return float("nan")


def says_why(response: Response, ground_truth: GroundTruth) -> Score:
    return Score(1.0, {"why": "it is good"})  # type: ignore[dict-item]


def leaves(response: Response, ground_truth: GroundTruth) -> float:
    sys.exit(0)


def takes_one(response: Response) -> float:
    return 1.0


def eat_memory(response: Response, ground_truth: GroundTruth) -> float:
    return float(len(bytearray(2**31)))


def torch_is_loaded(response: Response, ground_truth: GroundTruth) -> bool:
    return "torch" in sys.modules


def has_the_main_thread(response: Response, ground_truth: GroundTruth) -> float:
    return float(threading.current_thread() is threading.main_thread())
