"""What each step will do, in plain words, told before the first one."""

from __future__ import annotations

from megarl.data.demonstrations import FileDemonstrations
from megarl.training.run import Run

OLD = {
    "current": "none: with one optimizer step per rollout the policy that learns is the one that sampled",
    "recompute": "one forward pass by the trainer over every rollout, before its first optimizer step",
    "engine": "the engine's own, so no recompute pass: one forward pass less for every rollout. The first "
    "mini-batch's forward measures how far engine and trainer are apart",
}


REPLAY = {
    "off": "routers choose anew in every pass",
    "recorded": "the recompute pass writes down each token's experts, and every optimizer step of the rollout follows "
    "them (R2): the router's later choices don't change the ratios",
    "engine": "the engine returns each token's experts, and every pass over the rollout follows them (R3): trainer and "
    "engine compute with the same experts",
}


def further_passes(run: Run) -> list[str]:
    """What the algorithm asks for beyond the policy's own passes."""
    recipe, found = run.recipe, []
    if "ref_logprobs" in recipe.needs:
        found.append("one forward pass of the frozen reference policy, for the KL, with live routing")
    if "values" in recipe.needs:
        found.append("one forward pass of the critic, and a step of its own with every optimizer step")
    if "greedy_rewards" in recipe.needs:
        found.append("one greedy response to every prompt, whose reward is the baseline")
    if every := run.config.rl.audit_every:
        found.append(
            f"an audit every {every} steps: one forward pass over {run.config.rl.audit_responses} responses, with live "
            "routing, against the engine's log-probabilities"
        )
    return found


def plan_text(run: Run) -> str:
    """The execution plan of a run."""
    config, layout, arch = run.config, run.policy.layout, run.policy.architecture
    responses = config.rl.prompts_per_step * config.rl.group_size
    kind = f"{arch.num_experts} experts, top-{arch.top_k}" if arch.moe_layers else "dense"
    degrees = {name: size for name, size in vars(layout).items() if size not in (None, 1)}
    split = ", ".join(f"{name} {size}" for name, size in degrees.items()) or "no model parallelism"
    return "\n".join(
        (
            f"Plan of run {config.name!r} (folder {run.folder})",
            f"  model      {arch.transformer['num_layers']} layers, {kind}; {run.policy.platform.kind}, "
            f"{run.groups.world_size} ranks: {split}, {run.groups.replica_count} data-parallel replicas",
            *(f"  data       {line}" for line in run.prompts.told()),
            f"  cold start {config.sft.steps} steps of {config.sft.batch_size} demonstrations{_learned(run)}",
            f"  each step  {config.rl.prompts_per_step} prompts x {config.rl.group_size} responses = {responses}, "
            f"scored, then {run.minibatches} optimizer steps of {run.recipe.name}, then a verified weight sync",
            f"  engine     {config.engine.kind}, temperature {config.sampling.temperature:g}, up to "
            f"{config.sampling.max_new_tokens} new tokens",
            f"  old log-probabilities  {run.sources.old_logprobs}: {OLD[run.sources.old_logprobs]}",
            f"  routing replay         {run.sources.routing_replay}: {REPLAY[run.sources.routing_replay]}",
            *(f"  further passes         {what}" for what in further_passes(run)),
        )
    )


def _learned(run: Run) -> str:
    made = run.demonstrations
    return f" from {made.path} ({made.tally.told()})" if isinstance(made, FileDemonstrations) else ""
