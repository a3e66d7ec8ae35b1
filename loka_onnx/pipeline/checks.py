"""Checks on a finished run that a caller may ask for."""

from __future__ import annotations

from loka_onnx.errors import BudgetMissed
from loka_onnx.report import ReportData

SPLIT = "certification"


def require_fp8(data: ReportData) -> None:
    """Check that at least one FP8 plan is inside the budget of every output.

    It is a check of accuracy, on the certification split: a plan counts whether or not its engine was the
    fastest one, and where its engine is a simulation.

    Raises:
        BudgetMissed: No FP8 plan is.
    """
    fp8 = {plan.id for plan in data.plans.plans if plan.fp8_sites}
    judged = [e for e in data.evaluations.evaluations if e.split == SPLIT and e.plan in fp8]
    if any(evaluation.is_within_budget for evaluation in judged):
        return
    bounds = [
        f"{evaluation.engine}, {output.output}: upper bound of {output.difference.judged_name} "
        f"{output.difference.judged.upper:+.3%} "
        f"against {output.budget:.3%}{''.join(f', {remark}' for remark in output.remarks)}"
        for evaluation in judged
        for output in evaluation.outputs
        if output.difference is not None
    ]
    raise BudgetMissed(
        "no FP8 plan is inside the budget",
        where=data.title,
        evidence="; ".join(bounds) or "no FP8 engine could be evaluated here",
        remedy="raise `outputs.budget`, give more certification rows, or run without --require-fp8 to take "
        "the high-precision engine",
    )
