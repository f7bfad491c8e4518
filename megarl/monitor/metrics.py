"""Every metric megarl logs, under the names practitioners know. `docs/metrics.md` is made from these rows."""

from __future__ import annotations

from megarl.monitor.policy_metrics import POLICY
from megarl.monitor.registry import MetricSpec, Registry

ROLLOUT = (
    MetricSpec(
        "rollout/reward_mean",
        "Mean reward of the scored responses, shaping included.",
        "reward",
        "Rises. Flat from the start: tasks too hard or too easy. Falling: see train/grad_norm.",
        "response_mean",
        console="reward",
    ),
    MetricSpec(
        "rollout/reward_std",
        "Standard deviation of the reward inside a group, averaged over groups: the signal to learn from.",
        "reward",
        "Above 0. Near 0: all responses to a prompt do equally well, and advantages vanish.",
        "group_mean",
    ),
    MetricSpec(
        "rollout/reward_part/{part}",
        "Mean score of one verifier or shaping term, by its name.",
        "reward",
        reduction="response_mean",
    ),
    MetricSpec(
        "rollout/accuracy",
        "Share of right responses: those to which the verifier that the prompt names gives full marks (1 or more), "
        "whatever weights, shaping and punishments make of it. A part of the marks is not right; a response without a "
        "verdict is left out; one that a shut gate kept from its verifier has the verdict rewards.gate_value.",
        "share",
        "0.1 to 0.9 while learning; outside, most groups carry no signal.",
        "response_mean",
        console="acc",
    ),
    MetricSpec(
        "rollout/response_length_mean",
        "Mean tokens of a response, the end token included.",
        "tokens",
        "Moves smoothly. Racing to the budget: repetition or reward hacking; collapsing: no more reasoning.",
        "response_mean",
        console="len",
    ),
    MetricSpec("rollout/prompt_length_mean", "Mean tokens of a prompt.", "tokens", "", "response_mean"),
    MetricSpec(
        "rollout/truncated_share",
        "Share of responses cut off by the token budget.",
        "share",
        "Under 0.1. Above: raise the budget or penalise length, or the policy learns from cut answers.",
        "response_mean",
        console="cut",
    ),
    MetricSpec(
        "rollout/aborted_share",
        "Share of responses ended by the engine before they finished.",
        "share",
        "0 unless rollouts are partial.",
        "response_mean",
    ),
    MetricSpec(
        "rollout/unscored",
        "Responses whose verifier failed or timed out. They are masked, which is not a reward of 0.",
        "responses",
        "0. A handful is a slow verifier; many are a broken one.",
        "sum",
    ),
    MetricSpec(
        "rollout/unscored_reason/{reason}",
        "Unscored responses by why: "
        "timed_out, bad_ground_truth, worker_died, sandbox, raised, no_number, service, other.",
        "responses",
        "bad_ground_truth is a fault of the data's row, sandbox of the machine.",
        "sum",
    ),
    MetricSpec("rollout/responses", "Responses generated for this step.", "responses", "", "sum"),
    MetricSpec("rollout/tokens", "Response tokens generated for this step.", "tokens", "", "sum"),
    MetricSpec("rollout/groups", "Groups generated for this step.", "groups", "", "sum"),
    MetricSpec(
        "rollout/groups_kept",
        "Groups that go into training.",
        "groups",
        "Near rollout/groups unless sampling is dynamic.",
        "sum",
    ),
    MetricSpec(
        "rollout/groups_dropped/{reason}",
        "Groups left out of training by dynamic sampling: same_reward (all rewards are equal) or same_verdict (the "
        "verifier says the same of all, and only shaping tells them apart).",
        "groups",
        "",
        "sum",
    ),
    MetricSpec(
        "rollout/groups_all_correct",
        "Groups in which every response with a verdict is right (see rollout/accuracy): nothing to learn, the prompt "
        "is too easy.",
        "groups",
        "Under half of rollout/groups.",
        "sum",
    ),
    MetricSpec(
        "rollout/groups_all_wrong",
        "Groups with verdicts of which none is right (see rollout/accuracy): nothing to learn, the prompt is too hard.",
        "groups",
        "Under half of rollout/groups.",
        "sum",
    ),
    MetricSpec(
        "rollout/staleness_mean",
        "Mean age of a response's weights: versions between sampling and training on it.",
        "versions",
        "0 when rollouts and training alternate.",
        "response_mean",
    ),
    MetricSpec(
        "rollout/stale_responses",
        "Responses older than rl.max_staleness, dropped or corrected as rl.stale_responses says.",
        "responses",
        "0 when rollouts and training alternate.",
        "sum",
    ),
)

TRAIN = (
    MetricSpec(
        "train/grad_norm",
        "Gradient norm over all parameters before clipping.",
        "norm",
        "Within a factor of 10 of its running level. Spikes: a bad batch; 0: no active token; nan: stop.",
        "mean",
        console="grad",
    ),
    MetricSpec("train/lr", "Learning rate of the last optimizer step.", "1", "Follows the schedule."),
    MetricSpec("train/optimizer_steps", "Optimizer steps taken in this step.", "steps"),
    MetricSpec(
        "train/skipped_steps",
        "Optimizer steps not taken: no active token in the whole batch, or a gradient that is not finite (the "
        "policy's or the critic's); the learning rate stays where it is in its schedule.",
        "steps",
        "0.",
    ),
    MetricSpec(
        "train/micro_batches", "Micro-batches over all replicas, fillers included.", "count", "", "sum"
    ),
)

SFT = (
    MetricSpec(
        "sft/loss",
        "Cross-entropy per target token.",
        "nats",
        "Falls. Below the entropy of the demonstrations: it memorises.",
        "token_mean",
        console="sft_loss",
    ),
    MetricSpec(
        "sft/grad_norm",
        "Gradient norm before clipping.",
        "norm",
        "As train/grad_norm.",
        "mean",
        console="grad",
    ),
    MetricSpec("sft/lr", "Learning rate of this step.", "1", "Follows the schedule."),
    MetricSpec("sft/tokens", "Target tokens of this step.", "tokens", "", "sum"),
    MetricSpec(
        "sft/skipped_steps",
        "Steps of the cold start so far that changed nothing, since their gradient was not finite; the learning rate "
        "stays where it is in its schedule.",
        "steps",
        "0.",
    ),
)

EVAL = (
    MetricSpec(
        "eval/accuracy",
        "Share of held-out prompts answered right (see rollout/accuracy); it chooses the best checkpoint.",
        "share",
        "Rises with rollout/accuracy. Rollout alone rising: over-fitting to the training prompts.",
        "response_mean",
        console="eval_acc",
    ),
    MetricSpec("eval/reward_mean", "Mean reward on held-out prompts.", "reward", "Rises.", "response_mean"),
    MetricSpec(
        "eval/response_length_mean",
        "Mean tokens of a held-out response.",
        "tokens",
        "Moves smoothly.",
        "response_mean",
        console="eval_len",
    ),
    MetricSpec(
        "eval/truncated_share",
        "Share of held-out responses cut off by the budget.",
        "share",
        "Under 0.1.",
        "response_mean",
    ),
    MetricSpec("eval/unscored", "Held-out responses whose verifier failed.", "responses", "0.", "sum"),
    MetricSpec("eval/prompts", "Held-out prompts evaluated.", "prompts", "", "sum"),
    MetricSpec(
        "eval/{dataset}/accuracy",
        "As eval/accuracy, on one of several held-out sets.",
        "share",
        reduction="response_mean",
    ),
    MetricSpec(
        "eval/{dataset}/response_length_mean",
        "As eval/response_length_mean, on one of several held-out sets.",
        "tokens",
        reduction="response_mean",
    ),
)

ROUTING = (
    MetricSpec(
        "routing/flip_share_first",
        "Share of (token, MoE layer) routes where the trainer's live top-k is another set than the given one, in the "
        "first mini-batch: engine against trainer with the same weights (0 for recorded routes).",
        "share",
        "Near 0 in float32; up to about 0.1 in bfloat16 for large models (arXiv:2510.11370).",
    ),
    MetricSpec(
        "routing/flip_share_last",
        "The same in the last mini-batch, after the updates before it.",
        "share",
        "About 0.1 an update was reported for 48 layers (arXiv:2507.18071); what replay undoes.",
        console="flips",
    ),
    MetricSpec("routing/flip_share/{layer}", "The same, of one layer.", "share"),
    MetricSpec(
        "routing/token_flip_share",
        "Share of tokens whose live routing differs in any layer, in the last mini-batch.",
        "share",
    ),
    MetricSpec(
        "routing/load_cv",
        "Expert load: standard deviation over mean of the tokens sent to each expert, averaged over layers.",
        "ratio",
        "Well below 1; a rising value means that few experts do the work.",
    ),
    MetricSpec(
        "routing/dead_experts",
        "Experts of all layers that got no token in the last mini-batch.",
        "experts",
        "0 for batches of many tokens.",
    ),
    MetricSpec("routing/entropy", "Mean entropy of the routers' distributions over all experts.", "nats"),
    MetricSpec(
        "routing/bytes_per_token",
        "Size of the engine's routes, over all MoE layers.",
        "bytes",
        "MoE layers times top-k for up to 256 experts.",
    ),
    MetricSpec(
        "routing/stale_tokens",
        "Tokens whose routes were made by other weights than those that sampled them (a weight update fell into their "
        "generation): their routing stays live.",
        "tokens",
        "0 unless generation and updates overlap.",
        "sum",
    ),
)

AUDIT = (
    MetricSpec(
        "audit/k3",
        "As mismatch/k3, of a forward pass of its own with live routing, every rl.audit_every steps.",
        "nats",
        "As mismatch/k3 where nothing is replayed; what it is above mismatch/k3 elsewhere, replay takes away.",
        "token_mean",
    ),
    MetricSpec("audit/abs_diff_mean", "As mismatch/abs_diff_mean, of the audit.", "nats", "", "token_mean"),
    MetricSpec("audit/abs_diff_max", "As mismatch/abs_diff_max, of the audit.", "nats", "", "max"),
    MetricSpec("audit/ratio_outside", "As mismatch/ratio_outside, of the audit.", "share", "", "token_mean"),
    MetricSpec("audit/tokens", "Response tokens that were audited.", "tokens", "", "sum"),
)

SYNC = (
    MetricSpec(
        "sync/seconds",
        "Time to bring the new weights into the engines, pause to resume.",
        "s",
        "Small beside perf/step_time.",
        "max",
        timing=True,
    ),
    MetricSpec("sync/bytes", "Bytes of weights sent to one engine.", "bytes", "Constant."),
    MetricSpec(
        "sync/tensors",
        "Tensors whose digest in the engine was compared with the sender's.",
        "tensors",
        "Constant.",
    ),
    MetricSpec(
        "sync/version",
        "Weight version the engines sample with after this step.",
        "versions",
        "Goes up by one.",
    ),
)

PERF = (
    MetricSpec(
        "perf/step_time", "Wall-clock time of the step.", "s", "", "max", console="s/step", timing=True
    ),
    MetricSpec(
        "perf/generate_seconds", "Time of generating and scoring, which overlap.", "s", "", "max", timing=True
    ),
    MetricSpec("perf/train_seconds", "Time of forward, backward and optimizer.", "s", "", "max", timing=True),
    MetricSpec(
        "perf/tokens_per_second",
        "Response tokens of the step over its whole time, all ranks together.",
        "tokens/s",
        "Steady. A slow fall is growing responses or a leak.",
        "sum",
        console="tok/s",
        timing=True,
    ),
    MetricSpec(
        "perf/generate_tokens_per_second",
        "Response tokens over generation time.",
        "tokens/s",
        reduction="sum",
        timing=True,
    ),
)


def default_registry() -> Registry:
    """Return everything megarl itself logs, in the order of the console line and of the docs."""
    return Registry((*EVAL, *ROLLOUT, *SFT, *POLICY, *TRAIN, *ROUTING, *AUDIT, *SYNC, *PERF))
