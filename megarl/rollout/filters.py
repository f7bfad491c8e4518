"""What becomes of sampled groups before they are learned from: dynamic sampling, overlong responses, staleness.

The order matters. Dynamic sampling reads verdicts and rewards as they were scored; then DAPO's punishment of overlong
responses is added, exactly once; then come the advantages. Staleness looks at weight versions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megarl.records import Group, Sample
from megarl.rewards import RewardSettings

# --- dynamic sampling ---


def sample_until_enough(
    sample_round: Callable[[Sequence[int]], list[Group]],
    *,
    wanted: int,
    rounds: int,
    dynamic: bool,
    gather: Callable[[int], Sequence[int]] = lambda missing: [missing],
) -> list[Group]:
    """Sample rounds until every replica keeps `wanted` groups, or `rounds` rounds are over; return this replica's, in
    order.

    gather: what this replica lacks -> what each replica lacks, in their order. All replicas take part in every round,
    so that their prompt streams stay together, also one that lacks nothing. sample_round: what each replica lacks ->
    as many more groups as this one lacks. dynamic: groups in which the verifier says the same of every response, or
    whose rewards are all equal, are dropped with a reason (DAPO, arXiv:2503.14476, Eq. 11).
    """
    groups: list[Group] = []
    for _ in range(rounds):
        missing = gather(wanted - sum(g.dropped is None for g in groups))
        if not any(missing):
            break
        sampled = sample_round(missing)
        groups += [_dropped_if_same(g) for g in sampled] if dynamic else sampled
    return groups


def _dropped_if_same(group: Group) -> Group:
    """Shaping alone (length, format) makes no group worth learning from."""
    scored = [s for s in group.samples if s.reward is not None]
    if len({s.reward for s in scored}) <= 1:
        return replace(group, dropped="same_reward")
    verdicts = {v for s in scored if (v := verdict(s)) is not None}
    return replace(group, dropped="same_verdict") if len(verdicts) == 1 else group


# --- verdicts ---


def verdict(sample: Sample) -> float | None:
    """Return the score of the verifier that the prompt names, before weights, clipping, shaping and punishments.

    Where the verifier did not run, since a gate was shut, it is the raw reward; None where it could not score.
    """
    return sample.reward_parts.get(sample.prompt.verifier, raw_reward(sample))


def is_right(sample: Sample) -> bool | None:
    """Return whether the verifier gives full marks, 1 or more: a part of the tests passed is not right. None without a
    verdict."""
    found = verdict(sample)
    return None if found is None else found >= 1.0


# --- overlong responses ---

RAW = "raw"


def apply_overlong_penalty(group: Group, settings: RewardSettings, max_new_tokens: int) -> Group:
    """Return the group with its overlong responses punished and, where asked for, truncated ones masked (DAPO,
    arXiv:2503.14476, section 3.4). A dropped group stays as it is: nothing is learned from it.

    Raises ValueError for a group that was punished before.
    """
    if group.dropped is not None:
        return group
    samples = group.samples
    if settings.soft_overlong is not None:
        lengths = np.array([len(sample.response_ids) for sample in samples])
        amounts = soft_overlong_penalty(lengths, max_new_tokens, settings.soft_overlong)
        samples = tuple(add_once(s, "soft_overlong", float(a)) for s, a in zip(samples, amounts, strict=True))
    if settings.overlong_filtering:
        samples = tuple(map(mask_overlong, samples))
    return replace(group, samples=samples)


def soft_overlong_penalty(lengths: np.ndarray, max_length: int, cache_length: int) -> np.ndarray:
    """Return DAPO's soft overlong punishment, float32 [responses], to be added to the reward (Eq. 13).

    It is 0 up to max_length - cache_length tokens, falls linearly to -1 at max_length, and is -1 beyond. lengths:
    [responses], tokens.
    """
    beyond = np.float32(max_length - cache_length) - lengths.astype(np.float32)
    return np.clip(beyond / np.float32(cache_length), -1, 0)


def add_once(sample: Sample, name: str, amount: float) -> Sample:
    """Return the sample with `amount` added to its reward and logged as `reward_parts[name]`; the raw reward is kept.

    An unscored sample stays unscored. Raises ValueError where `name` was added before: a punishment is applied exactly
    once, however often a partial rollout passes through.
    """
    if name in sample.reward_parts:
        raise ValueError(f"sample {sample.sample_id!r}: {name!r} was added to its reward before")
    parts = {RAW: sample.reward, **sample.reward_parts, name: amount}
    reward = None if sample.reward is None else sample.reward + amount
    return replace(sample, reward=reward, reward_parts=parts)


def raw_reward(sample: Sample) -> float | None:
    """Return the reward as it was scored, whatever was added to it since."""
    return sample.reward_parts.get(RAW, sample.reward)


def mask_overlong(sample: Sample) -> Sample:
    """Apply DAPO's overlong filtering: a truncated response keeps its reward (its group's statistics are true), but
    none of its tokens is trained on."""
    if sample.finish_reason != "length":
        return sample
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


# --- staleness ---

StaleResponses = Literal["stop", "drop", "correct"]


class WrongWeights(RuntimeError):
    """A token was sampled by other weights than the trainer believes the engine to have had."""


def filter_stale(
    groups: Sequence[Group], *, version: int, most: int, then: StaleResponses
) -> tuple[list[Group], dict[str, tuple[float, float]]]:
    """Return the groups without the responses that are more than `most` versions behind (`drop`), or with them, for
    the algorithm's correction (`correct`); and (sum, count) pairs of staleness, as `rollout_counts` gives them.
    version: of the weights that the engine holds and that are trained now.

    Raises WrongWeights naming the sample: always for a version from the future, with `stop` for a stale one.
    """
    bound = most if then == "stop" else version
    aged = [[(s, _age(s, version, bound)) for s in g.samples] for g in groups]
    if then == "drop":
        kept = [tuple(s for s, age in samples if age <= most) for samples in aged]
        groups = [replace(g, samples=samples) for g, samples in zip(groups, kept, strict=True)]
    ages = [age for samples in aged for _, age in samples]
    return list(groups), {
        "staleness_mean": (float(sum(ages)), float(len(ages))),
        "stale_responses": (float(sum(age > most for age in ages)), 1.0),
    }


def _age(sample: Sample, version: int, most: int) -> int:
    """Return how many versions the oldest token is behind."""
    for span in sample.spans:
        if not 0 <= version - span.version <= most:
            raise WrongWeights(
                f"sample {sample.sample_id!r}: its tokens {span.start} to {span.end} were sampled by weight "
                f"version {span.version}, the engine was given version {version}"
            )
    return max((version - span.version for span in sample.spans), default=0)
