"""Objectives as data: advantages, ratios, surrogates, KL, corrections and token weights as pure tensor
functions, and one table of recipes that combines them. Imports torch only. docs/algorithms.md is the user's
page."""

from megarl.algorithms.advantages import advantage_metrics, compute_advantages, whiten
from megarl.algorithms.batches import add_token_weights, assign_advantages
from megarl.algorithms.critic import value_loss
from megarl.algorithms.describe import recipe_table, render_algorithms
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.loss import LossOutput, policy_loss
from megarl.algorithms.metric_table import METRICS, MetricInfo
from megarl.algorithms.metrics import Metric, Metrics, average_steps, combine, finalize, reduce_metrics
from megarl.algorithms.mismatch import mismatch_metrics
from megarl.algorithms.recipe import Recipe, Sources, resolve_sources
from megarl.algorithms.recipes import RECIPES, get_recipe, make_recipe
from megarl.algorithms.token_advantages import Gae, gae, token_advantages
from megarl.algorithms.weights import Totals, active_tokens, local_totals, token_weights

__all__ = [
    "METRICS",
    "RECIPES",
    "Gae",
    "LossOutput",
    "Metric",
    "MetricInfo",
    "Metrics",
    "Recipe",
    "Sources",
    "Totals",
    "active_tokens",
    "add_token_weights",
    "advantage_metrics",
    "assign_advantages",
    "average_steps",
    "combine",
    "compute_advantages",
    "finalize",
    "gae",
    "get_recipe",
    "kl_estimate",
    "local_totals",
    "make_recipe",
    "mismatch_metrics",
    "policy_loss",
    "recipe_table",
    "reduce_metrics",
    "render_algorithms",
    "resolve_sources",
    "token_advantages",
    "token_weights",
    "value_loss",
    "whiten",
]
