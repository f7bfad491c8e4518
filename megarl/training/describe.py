"""What each step of a run will do, in plain words, printed before the first one."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.training.resolve import Plan

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


def describe_plan(plan: Plan, *, platform: str, data: Sequence[str], demonstrations: str) -> str:
    """Describe the execution of a run. platform: "cpu" | "cuda". data: what became of the prompts, a line each.
    demonstrations: where they come from, in a few words."""
    config, layout, arch = plan.config, plan.layout, plan.architecture
    responses = config.rl.prompts_per_step * config.rl.group_size
    kind = f"{arch.num_experts} experts, top-{arch.top_k}" if arch.moe_layers else "dense"
    degrees = {name: size for name, size in layout.model_dump().items() if size not in (None, 1)}
    split = ", ".join(f"{name} {size}" for name, size in degrees.items()) or "no model parallelism"
    replicas = plan.world_size // layout.replica_ranks()
    return "\n".join(
        (
            f"Plan of run {config.name!r} (folder {plan.folder})",
            f"  model      {arch.transformer['num_layers']} layers, {kind}; {platform}, "
            f"{plan.world_size} ranks: {split}, {replicas} data-parallel replicas",
            *(f"  data       {line}" for line in data),
            f"  cold start {config.sft.steps} steps of {config.sft.batch_size} demonstrations{demonstrations}",
            f"  each step  {config.rl.prompts_per_step} prompts x {config.rl.group_size} responses = {responses}, "
            f"scored, then {plan.minibatches} optimizer steps of {plan.recipe.name}, then a verified weight sync",
            f"  engine     {config.engine.kind}, temperature {config.sampling.temperature:g}, up to "
            f"{config.sampling.max_new_tokens} new tokens",
            f"  old log-probabilities  {plan.sources.old_logprobs}: {OLD[plan.sources.old_logprobs]}",
            f"  routing replay         {plan.sources.routing_replay}: {REPLAY[plan.sources.routing_replay]}",
            *(f"  further passes         {what}" for what in _further_passes(plan)),
        )
    )


def _further_passes(plan: Plan) -> list[str]:
    """What the algorithm asks for beyond the policy's own passes."""
    needs, found = plan.recipe.needs, []
    if "ref_logprobs" in needs:
        found.append("one forward pass of the frozen reference policy, for the KL, with live routing")
    if "values" in needs:
        found.append("one forward pass of the critic, and a step of its own with every optimizer step")
    if "greedy_rewards" in needs:
        found.append("one greedy response to every prompt, whose reward is the baseline")
    if every := plan.config.rl.audit_every:
        found.append(
            f"an audit every {every} steps: one forward pass over {plan.config.rl.audit_responses} responses, with "
            "live routing, against the engine's log-probabilities"
        )
    return found
