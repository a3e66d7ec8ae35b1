"""Recipes that the run file's `plan` asks to measure."""

from __future__ import annotations

from loka_onnx.config import PlanConfig, ScaleRule
from loka_onnx.core.recipe import AMAX, MSE, Granularity, Recipe

_RULES = {
    ScaleRule.AMAX: (AMAX,),
    ScaleRule.PERCENTILE: ("percentile-99.99",),
    ScaleRule.MSE: (MSE,),
    # The first of several equal ones is taken.
    ScaleRule.BEST: (AMAX, "percentile-99.99", MSE),
}


def planned_recipes(plan: PlanConfig) -> tuple[Recipe, ...]:
    """Both granularities of weights under each scale rule that competes.

    Both granularities are measured whatever `plan.weight_granularity` lets a plan use: the profile shows
    both, and an interaction has no channels.
    """
    weights = (Granularity.PER_TENSOR, Granularity.PER_CHANNEL)
    return tuple(
        Recipe.of(plan.format.number_format, weight, rule)
        for rule in _RULES[plan.scale]
        for weight in weights
    )
