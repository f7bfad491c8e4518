"""SHIM until the real one is merged."""

from megarl.rollout.staleness import settle_staleness as filter_stale
from megarl.training.overlong import settle_overlong as apply_overlong_penalty
from megarl.training.rl import fill as sample_until_enough

__all__ = ["apply_overlong_penalty", "filter_stale", "sample_until_enough"]
