"""What the kernel times that are shipped for a device say of plans, beside what their engines took.

An engine of a plan is expected to take what our BF16 engine of the same model took, plus the difference of
the two plans' products and quantize steps (`planning.site_speed.expected_us`): nothing of the run that is
predicted goes into it but the time of that one engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.engines.plans import Engine
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.site_speed import DeviceTimings, SiteSpeeds, expected_us
from loka_onnx.planning.timings import shipped_timings


def with_predictions(
    engines: Sequence[Engine], device: str, batches: Sequence[int]
) -> dict[str, PrecisionPlan]:
    """Plans with the time of their products, by name of the engine; none without kernel times of a device."""
    timings = shipped_timings(device)
    if not timings:
        return {}
    speeds: dict[str, SiteSpeeds] = {}
    found = {}
    for engine in engines:
        model = engine.variant.source.model
        if model.digest not in speeds:
            known = DeviceTimings(device, engine.backend, timings, tuple(sorted(batches)))
            scales = {s.name: Granularity.PER_TENSOR for s in model.sites if s.kind is SiteKind.LINEAR}
            graph = GraphModel.load(model.path)
            speeds[model.digest] = SiteSpeeds(graph, model.sites, known, Precision.BF16, scales)
        plan = engine.plan
        products = speeds[model.digest].predicted_us(plan.base, plan.decisions)
        found[engine.name] = replace(plan, predicted_us={device: products})
    return found


def held_against(
    engines: Sequence[Engine], measured: Mapping[int, Mapping[str, float]], device: str
) -> dict[str, Any]:
    """Predicted and measured times of every engine with FP8, and the median of their relative errors.

    Args:
        engines: Engines of this project's, with FP8 and without.
        measured: Microseconds by batch size and name of the engine, as far as they ran.
        device: Device, as run files name it.

    Returns:
        By batch size and engine ``predicted_us``, ``measured_us``, ``relative_error`` (predicted over
        measured less one) and ``reference``, and over all of them ``median_relative_error``; empty where
        nothing could be predicted.
    """
    plans = with_predictions(engines, device, list(measured))
    found: dict[str, Any] = {}
    for engine in engines:
        reference = _reference(engine, engines)
        if reference is None or engine.name not in plans:
            continue
        known = {batch: times[reference] for batch, times in measured.items() if reference in times}
        for batch, us in expected_us(plans[engine.name], plans[reference], known, device).items():
            if engine.name in measured[batch]:
                took = measured[batch][engine.name]
                found.setdefault(str(batch), {})[engine.name] = {
                    "predicted_us": us,
                    "measured_us": took,
                    "relative_error": us / took - 1.0,
                    "reference": reference,
                }
    errors = [abs(each["relative_error"]) for batch in found.values() for each in batch.values()]
    return {"batches": found, "median_relative_error": median(errors)} if errors else {}


def _reference(engine: Engine, others: Collection[Engine]) -> str | None:
    """Name of the BF16 engine of the same model; None for an engine without FP8, and where there is none."""
    if not engine.plan.fp8_sites:
        return None
    model = engine.variant.source.model.digest
    same = (other for other in others if other.variant.source.model.digest == model)
    return next((other.name for other in same if other.plan.id == Precision.BF16), None)
