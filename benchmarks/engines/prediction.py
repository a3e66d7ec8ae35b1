"""What the kernel times that are shipped for a device say of plans, beside what their engines took.

An engine of a plan is expected to take what our BF16 engine of the same model took, plus the difference of
the two plans' products and quantize steps (`planning.expected_latency.expected_us`): nothing of the run that
is predicted goes into it but the time of that one engine. Where FP8 breaks up a larger kernel of the BF16
engine nothing is expected, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.engines.plans import Engine
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.site import SiteKind
from loka_onnx.core.timing import KernelTiming
from loka_onnx.engines.registry import get_backend
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.expected_latency import expected_us, why_not_expected
from loka_onnx.planning.site_speed import DeviceTimings, SiteSpeeds
from loka_onnx.planning.timings import shipped_timings


def with_predictions(
    engines: Sequence[Engine], device: str, batches: Sequence[int], timings: Sequence[KernelTiming]
) -> dict[str, PrecisionPlan]:
    """Plans with the time of their products, by name of the engine; none without kernel times of a device."""
    if not timings:
        return {}
    speeds: dict[str, SiteSpeeds] = {}
    found = {}
    for engine in engines:
        model = engine.variant.source.model
        if model.digest not in speeds:
            fused = get_backend(engine.backend).fused_sites(model.path, Precision.BF16)
            known = DeviceTimings(device, engine.backend, tuple(timings), tuple(sorted(batches)), fused=fused)
            recipes = {s.name: PER_TENSOR for s in model.sites if s.kind is SiteKind.LINEAR}
            graph = GraphModel.load(model.path)
            speeds[model.digest] = SiteSpeeds(graph, model.sites, known, Precision.BF16, recipes)
        plan = engine.plan
        of_model = speeds[model.digest]
        found[engine.name] = replace(
            plan,
            predicted_us={device: of_model.predicted_us(plan.base, plan.decisions)},
            breaks_up={device: of_model.broken_up(plan.decisions)},
        )
    return found


def held_against(
    engines: Sequence[Engine],
    measured: Mapping[int, Mapping[str, float]],
    device: str,
    timings: Sequence[KernelTiming] | None = None,
) -> dict[str, Any]:
    """Predicted and measured times of every engine with FP8, and the median of their relative errors.

    Args:
        engines: Engines of this project's, with FP8 and without.
        measured: Microseconds by batch size and name of the engine, as far as they ran.
        device: Device, as run files name it.
        timings: Kernel times; those that are shipped for the device where None.

    Returns:
        By batch size and engine ``predicted_us``, ``measured_us``, ``relative_error`` (predicted over
        measured less one) and ``reference``; over all of them ``median_relative_error``, None where there are
        none; and of engines that nothing can be expected of the reason (``not_predicted``). Empty where
        neither is known.
    """
    times = shipped_timings(device) if timings is None else timings
    plans = with_predictions(engines, device, list(measured), times)
    why_not: dict[str, str] = {}
    found: dict[str, Any] = {}
    for engine in engines:
        reference = _reference(engine, engines)
        if reference is None or engine.name not in plans:
            continue
        reason = why_not_expected(plans[engine.name], plans[reference], device)
        if reason:
            why_not[engine.name] = reason
        known = {batch: took[reference] for batch, took in measured.items() if reference in took}
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
    if not errors and not why_not:
        return {}
    typical = median(errors) if errors else None
    return {"batches": found, "median_relative_error": typical, "not_predicted": why_not}


def _reference(engine: Engine, others: Collection[Engine]) -> str | None:
    """Name of the BF16 engine of the same model; None for an engine without FP8, and where there is none."""
    if not engine.plan.fp8_sites:
        return None
    model = engine.variant.source.model.digest
    same = (other for other in others if other.variant.source.model.digest == model)
    return next((other.name for other in same if other.plan.id == Precision.BF16), None)
