"""Latency to expect of a plan, from the measured engine whose plan is most like it.

What two plans have in common takes the same in both and cancels (`site_speed.expected_us`); what they differ
in is known from times of single kernels, which see neither what an engine fuses nor what runs beside them.
The fewer sites differ, the less of the prediction rests on that. Nothing is predicted across a kernel that
only one of two plans breaks up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.planning.site_speed import expected_us, why_not_expected


@dataclass(frozen=True)
class Known:
    """A measured engine.

    Attributes:
        engine: Its id.
        plan: Its plan.
        us: Its latency by batch size, microseconds.
    """

    engine: str
    plan: PrecisionPlan
    us: Mapping[int, float]


@dataclass(frozen=True)
class Prediction:
    """The latency that an engine is expected to have.

    Attributes:
        start: Id of the engine whose measured latency it starts from; empty where there is none.
        us: By batch size, microseconds; empty where it cannot be told.
        why_not: Why not, in words; empty where it can.
    """

    start: str
    us: Mapping[int, float]
    why_not: str = ""


def predict(plan: PrecisionPlan, known: Iterable[Known], device: str) -> Prediction | None:
    """The latency of an engine of a plan, before it is measured.

    Args:
        plan: The plan.
        known: Measured engines, all by the engine maker that is to build this one, for the same architecture.
        device: Where.

    Returns:
        With a reason in place of times where the kernels of every measured plan are others; None where no
        plan in the same base precision was measured, or no time is known of the products.
    """
    obstacles = []
    alike = (each for each in known if each.plan.base is plan.base)
    for each in sorted(alike, key=lambda other: _unlike(plan, other.plan)):
        us = expected_us(plan, each.plan, each.us, device)
        if us:
            return Prediction(each.engine, us)
        obstacles.append(why_not_expected(plan, each.plan, device))
    why_not = next((reason for reason in obstacles if reason), "")
    return Prediction("", {}, why_not) if why_not else None


def _unlike(plan: PrecisionPlan, other: PrecisionPlan) -> int:
    """Sites that only one of two plans has in FP8."""
    return len({*plan.fp8_sites} ^ {*other.fp8_sites})
