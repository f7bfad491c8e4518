"""A verifier whose module takes a second to import."""

import time

time.sleep(1.0)


def fine(response, ground_truth) -> float:
    return 1.0
