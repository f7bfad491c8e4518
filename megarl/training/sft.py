"""Stage 1: supervised fine-tuning on demonstrations (cold start)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.data.packing import TokenSequence, make_micro_batches, micro_batch_count
from megarl.megatron.policy import StepResult
from megarl.monitor.progress import progress
from megarl.training.run import Run


def run_sft(run: Run, *, first_step: int = 1, after_step: Callable[[int], None] = lambda step: None) -> None:
    """Steps `first_step` to `sft.steps`, each on a batch of demonstrations. Collective.

    The trainer has this stage's optimizer. after_step(step): called when a step is done and logged.
    """
    section, groups = run.config.sft, run.groups
    share = section.batch_size // groups.replica_count
    left = section.steps - first_step + 1
    with progress("Cold start", left, unit="steps", enabled=groups.is_main, announce=True) as bar:
        for step in range(first_step, section.steps + 1):
            with run.clock.phase("cold start"):
                assert run.demonstrations is not None
                sequences = run.demonstrations.batch(step, share, groups.replica_index, groups.replica_count)
                loss, active, result = sft_step(run, sequences)
            bar.advance()
            if step % section.log_every == 0 or step == section.steps:
                bar.update(description=f"Cold start, loss {loss:.3f}")
                run.log(
                    step,
                    {
                        "sft/loss": loss,
                        "sft/grad_norm": result.grad_norm,
                        "sft/lr": result.lr,
                        "sft/tokens": active,
                    },
                )
            after_step(step)


def sft_step(run: Run, sequences: Sequence[TokenSequence]) -> tuple[float, float, StepResult]:
    """One optimizer step on the mean cross-entropy of a response token, over all replicas' sequences.

    Returns that mean, the global number of tokens, and the step's result.
    """
    policy, groups = run.policy, run.groups
    budget = run.config.batching.micro_batch_tokens
    count = max(1, groups.max_over_replicas(micro_batch_count(sequences, budget)))
    count = -(-count // policy.micro_batch_multiple) * policy.micro_batch_multiple
    micro_batches = make_micro_batches(sequences, budget, count)
    active = groups.sum_over_replicas(
        torch.tensor(float(sum(s.active_tokens for s in sequences)), device=groups.device)
    )

    def loss(number: int, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        value = -logprobs.sum() / active
        return value, value.detach()

    result = policy.step(micro_batches, loss)
    collected = groups.share_from_last_stage(result.collected)
    mean = groups.sum_over_replicas(torch.stack(collected).sum().to(groups.device))
    return float(mean), float(active), result
