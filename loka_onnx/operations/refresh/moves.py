"""Changes between a run and its refresh: scales and KL of sites, accuracy of engines."""

from __future__ import annotations

from math import log

from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import OutputMove, SiteMove
from loka_onnx.core.plan import Decision, PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.operations.refresh.earlier import EarlierRun

CERTIFICATION = "certification"


def site_moves(before: EarlierRun, profile: Profile, plans: PlanSet) -> tuple[SiteMove, ...]:
    """Return the sites that any plan runs in FP8, those whose scales moved most first."""
    moves: dict[str, SiteMove] = {}
    for plan in plans.plans:
        earlier = before.plans.plan(plan.id)
        for decision in plan.decisions:
            if decision.recipe is not None and decision.site not in moves:
                moves[decision.site] = _site_move(before, profile, earlier.decision(decision.site), decision)
    return tuple(sorted(moves.values(), key=lambda move: -_distance(move)))


def output_moves(before: EvaluationSet, now: EvaluationSet) -> tuple[OutputMove, ...]:
    """Return the outputs of every engine that was judged on certification now."""
    return tuple(
        OutputMove(
            engine=evaluation.engine,
            output=output.output,
            judged=output.difference.judged_name,
            before=_earlier(before, evaluation.engine, output.output),
            now=output.difference.judged,
            budget=output.budget,
            status=output.budget_status,
        )
        for evaluation in now.evaluations
        for output in evaluation.outputs
        if evaluation.split == CERTIFICATION and output.difference is not None
    )


def _earlier(before: EvaluationSet, engine: str, output: str) -> Interval | None:
    try:
        outputs = before.of(engine, CERTIFICATION).outputs
    except KeyError:
        return None
    difference = next((item.difference for item in outputs if item.output == output), None)
    return None if difference is None else difference.judged


def _site_move(before: EarlierRun, profile: Profile, was: Decision, now: Decision) -> SiteMove:
    ratios = [b / a for a, b in zip(was.weight_scale, now.weight_scale, strict=False)]
    return SiteMove(
        now.site,
        (now.activation_scale or 1.0) / (was.activation_scale or 1.0),
        max(ratios, key=lambda ratio: abs(log(ratio)), default=1.0),
        _kl(before.profile, now),
        _kl(profile, now),
    )


def _kl(profile: Profile, decision: Decision) -> dict[str, Interval]:
    recipe = decision.recipe.id if decision.recipe is not None else ""
    items = profile.site(decision.site).sensitivities
    return {item.output: item.kl for item in items if item.recipe == recipe}


def _distance(move: SiteMove) -> float:
    return max(abs(log(move.activation)), abs(log(move.weight)))
