"""Expected latency of a plan, and the Pareto front of engines that were measured.

It is the latency of the measured engine with the most similar plan, plus the difference of both plans by
single kernel times. These show neither an engine's fusions nor concurrency: the fewer sites differ, the less
rests on them. Nothing is predicted across a kernel that only one plan breaks up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.errors import InternalError


@dataclass(frozen=True)
class Known:
    """A measured engine: its id, its plan, and its latency by batch size in microseconds."""

    engine: str
    plan: PrecisionPlan
    us: Mapping[int, float]


@dataclass(frozen=True)
class Prediction:
    """Expected latency by batch size in microseconds, from the engine `start`; empty where `why_not`."""

    start: str
    us: Mapping[int, float]
    why_not: str = ""


def predict_latency(plan: PrecisionPlan, known: Iterable[Known], device: str) -> Prediction | None:
    """Return the expected latency of a plan's engine, from engines of its backend and architecture.

    It has a reason in place of times where every measured plan has other kernels; None where no plan in the
    same base precision was measured, or no product time is known.
    """
    obstacles = []
    alike = (each for each in known if each.plan.base is plan.base)
    for each in sorted(alike, key=lambda other: len({*plan.quantized_sites} ^ {*other.plan.quantized_sites})):
        us = expected_us(plan, each.plan, each.us, device)
        if us:
            return Prediction(each.engine, us)
        obstacles.append(why_not_expected(plan, each.plan, device))
    why_not = next((reason for reason in obstacles if reason), "")
    return Prediction("", {}, why_not) if why_not else None


def expected_us(
    plan: PrecisionPlan, reference: PrecisionPlan, measured_us: Mapping[int, float], device: str
) -> dict[int, float]:
    """Return the latency by batch size of a plan's engine, from that of a `reference` plan's engine.

    Empty where only one of them breaks up a kernel (`why_not_expected`); batch sizes are those that both
    plans have a prediction for.
    """
    if why_not_expected(plan, reference, device):
        return {}
    ours, theirs = (p.predicted_us.get(device, {}) for p in (plan, reference))
    return {
        batch: us + ours[str(batch)] - theirs[str(batch)]
        for batch, us in measured_us.items()
        if str(batch) in ours and str(batch) in theirs
    }


def why_not_expected(plan: PrecisionPlan, reference: PrecisionPlan, device: str) -> str:
    """Return why kernel times do not compare two plans: only one breaks up a kernel; empty if they do."""
    ours, theirs = (p.breaks_up.get(device, {}) for p in (plan, reference))
    apart = {**ours, **theirs}
    unlike = sorted(ours.keys() ^ theirs.keys())
    if not unlike:
        return ""
    kernels = sorted({apart[site] for site in unlike})
    named = f"kernel{'s' if len(kernels) > 1 else ''} " + " and ".join(f"'{kernel}'" for kernel in kernels)
    others = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
    whose = "" if unlike[0] in ours else f" of plan '{reference.id}'"
    return (
        f"FP8 at '{unlike[0]}'{others}{whose} breaks up the {named}, and what the parts take was not measured"
    )


@dataclass(frozen=True)
class Point:
    """An engine, its time in any unit, and its worst upper bound over budget; infinite without a bound."""

    name: str
    time: float
    loss: float


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other dominates, by rising time, equal ones all; InternalError for a NaN."""
    for point in points:
        if isnan(point.time) or isnan(point.loss):
            raise InternalError(f"'{point.name}' has no place among the others", evidence=repr(point))
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.loss)):
        best = kept[-1] if kept else None
        if best is None or point.loss < best.loss or (point.time, point.loss) == (best.time, best.loss):
            kept.append(point)
    return tuple(kept)
