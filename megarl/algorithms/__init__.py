"""Objectives as data: a part for each slot (advantage, ratio, surrogate, token weights, KL, correction), and
one table of recipes that combines them. Pure functions of tensors, but for `batches.py`, which calls them on
records. Imports torch only. docs/algorithms.md is the user's page."""

from megarl.algorithms.advantages import Rewards, TokenRewards, advantage_metrics
from megarl.algorithms.batches import add_token_weights, assign_advantages
from megarl.algorithms.corrections import Correction, Mismatch
from megarl.algorithms.describe import render_algorithms
from megarl.algorithms.kl import KLEstimate
from megarl.algorithms.loss import LossOutput, policy_loss, value_loss
from megarl.algorithms.loss_metrics import mismatch_metrics
from megarl.algorithms.metrics import average_steps, combine, finalize, reduce_metrics
from megarl.algorithms.parts import Setting, part
from megarl.algorithms.ratios import LogRatios
from megarl.algorithms.recipe import LogprobAndRouteSource, Recipe, resolve_sources
from megarl.algorithms.recipes import RECIPES, get_recipe, make_recipe
from megarl.algorithms.surrogates import TokenLosses, Tokens
from megarl.algorithms.weights import Totals

__all__ = [
    "RECIPES",
    "Correction",
    "KLEstimate",
    "LogRatios",
    "LogprobAndRouteSource",
    "LossOutput",
    "Mismatch",
    "Recipe",
    "Rewards",
    "Setting",
    "TokenLosses",
    "TokenRewards",
    "Tokens",
    "Totals",
    "add_token_weights",
    "advantage_metrics",
    "assign_advantages",
    "average_steps",
    "combine",
    "finalize",
    "get_recipe",
    "make_recipe",
    "mismatch_metrics",
    "part",
    "policy_loss",
    "reduce_metrics",
    "render_algorithms",
    "resolve_sources",
    "value_loss",
]
