"""Runs that a small host cannot make: an FP8 engine that was measured and won; and a model of many sites."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from changed_run import with_target

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import (
    CalibrationBin,
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    Rejection,
    Route,
    TargetChoice,
    Why,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.report import ReportData

OVER_FP32 = Interval(2.104, 2.05, 2.161, 0.95, 10)
OVER_BF16 = Interval(1.622, 1.581, 1.66, 0.95, 10)
DELTA = Interval(1.2e-5, -4.0e-5, 6.4e-5, 0.95, 1600)
CURVE = (CalibrationBin(800, 0.031, 0.029), CalibrationBin(800, 0.24, 0.25))
DRIFT = {"1 %": -0.0214, "50 %": 0.00031, "99 %": 0.0187}
LATENCIES_US = {"fp32": 246.0, "bf16": 190.0, "fp8-safe": 117.0, "fp8-all": 109.0}
"""Median at batch 1,024 of each plan's engine on the target ``gpu``."""
BATCH = 1024
SCALE = 6.0 / 448
VERDICTS = (Verdict.SAFE, Verdict.UNSAFE, Verdict.UNDECIDED)
MAIN, ROUTED = "gpu-onnxruntime-sm90-bf16", "gpu-onnxruntime-sm90-fp8-safe"
HARM = Interval(0.0006, 0.0003, 0.0009, 0.999, 100)


def decided(base: ReportData) -> ReportData:
    """The sample run with a target where FP8 is fast, and its site speeds.

    The engine of fp8-safe is inside the budget and wins, that of fp8-all is faster and beyond it, that of
    bf16 is slower; one of fp32 was timed too.
    """
    judged = {"fp32": 0.0, "bf16": 2e-5, "fp8-safe": DELTA.value, "fp8-all": 9e-4}
    engines = [_engine(base, plan) for plan in judged]
    bf16 = replace(base.plan("fp32"), id="bf16", base=Precision.BF16)
    plans = (*base.plans.plans, bf16)
    evaluations = [_evaluation(base, engine, judged[engine.plan]) for engine in engines]
    emitted = next(e for e in engines if e.plan == "fp8-safe")
    evaluations.append(_evaluation(base, emitted, DELTA.value, "certification"))
    why = {"fp32": Why.SLOWER, "bf16": Why.SLOWER, "fp8-all": Why.BEYOND}
    times = {"fp32": OVER_FP32, "bf16": OVER_BF16, "fp8-all": None}
    others = (e for e in engines if e is not emitted)
    losers = tuple(Rejection(e.id, why[e.plan], f"{why[e.plan]}", times[e.plan], 0.4) for e in others)
    choice = TargetChoice("gpu", emitted.id, "fp8-safe", "fastest inside", "measured on the target", losers)
    return replace(
        base,
        engines=(*engines, *base.engines),
        evaluations=EvaluationSet((*evaluations, *base.evaluations.evaluations), "2026-11-27"),
        plans=PlanSet(plans, base.plans.notes, _speeds(base)),
        choice=Choice((choice, *base.choice.targets)),
        profile=_with_histograms(replace(base.profile, synthetic=False)),
        data=replace(base.data, synthetic=False),
    )


def routed(base: ReportData, plan: str = "fp8-safe") -> ReportData:
    """The main engine is BF16; requests of more than 256 rows go to one in FP8."""
    routes = (Route(256, MAIN, "bf16"), Route(1024, f"gpu-onnxruntime-sm90-{plan}", plan, OVER_FP32))
    return with_target(decided(base), engine=MAIN, plan="bf16", routes=routes)


def _engine(base: ReportData, plan: str) -> EngineArtifact:
    first = base.engines[0]
    return replace(first, plan=plan, target="gpu", architecture="sm90", simulated=False, sites=())


def _evaluation(
    base: ReportData, engine: EngineArtifact, value: float, split: str = "selection"
) -> Evaluation:
    """On certification with a curve of two bins and quantiles, timed on a busy host."""
    model = next(e for e in base.evaluations.evaluations if e.plan == "fp8-safe" and e.outputs)
    (output,) = model.outputs
    half = (DELTA.upper - DELTA.lower) / 2
    delta = Interval(value, value - half, value + half, 0.95, 1600)
    status = "within" if delta.upper <= output.budget else "beyond"
    difference = replace(output.difference, delta_ne=delta)
    output = replace(output, difference=difference, budget_status=status, rows_to_decide=None)
    latency = Latency(BATCH, LATENCIES_US[engine.plan], 150.0, 190.0, 200, "H100", True)
    if split == "certification":
        output, latency = replace(output, calibration=CURVE, drift=DRIFT), replace(latency, host_load=2.5)
    names = (engine.id, engine.backend, engine.plan, engine.target, split)
    return Evaluation(*names, 2400, (output,), (latency,), "measured")


def _speeds(base: ReportData) -> tuple[SiteSpeed, ...]:
    """The first site fast, the second slow, nothing known of the third."""
    known = (
        (SpeedVerdict.FAST, {"1024": 4.0}, True),
        (SpeedVerdict.SLOW, {"1024": -1.0}, False),
        (SpeedVerdict.UNKNOWN, {}, False),
    )
    return tuple(
        SiteSpeed(site.name, "gpu", verdict, saved, dict.fromkeys(saved, 1.0), "dense", measured, "times")
        for site, (verdict, saved, measured) in zip(base.modified.sites, known, strict=False)
    )


def histogram(seed: int) -> MagnitudeHistogram:
    """Magnitudes of a normal distribution over about 24 octaves."""
    rng = np.random.default_rng(seed)
    exponents = np.clip(rng.normal(1000, 20, 4000).astype(int), 900, 1090)
    counts = np.bincount(exponents - exponents.min())
    return MagnitudeHistogram(17, int(exponents.min()), tuple(int(c) for c in counts))


def _with_histograms(profile: Profile) -> Profile:
    entries = tuple(
        replace(entry, operands={n: replace(s, histogram=histogram(seed)) for n, s in entry.operands.items()})
        for seed, entry in enumerate(profile.sites)
    )
    return replace(profile, sites=entries)


def large(base: ReportData, sites: int) -> ReportData:
    """The same run over a model with so many sites, each with a histogram of its own."""
    site, entry = base.modified.sites[0], base.profile.sites[0]
    (activation, weight), (stats,) = site.operands, entry.operands.values()
    inputs = {f"tower.{i // 10:03d}.fc{i % 10}": f"tower.{i // 10:03d}.fc{i % 10}:in" for i in range(sites)}
    operands = {name: (replace(activation, tensor=tensor), weight) for name, tensor in inputs.items()}
    model = replace(
        base.modified, sites=tuple(replace(site, name=name, operands=operands[name]) for name in inputs)
    )
    entries = tuple(
        replace(entry, site=name, operands={tensor: replace(stats, histogram=histogram(seed))})
        for seed, (name, tensor) in enumerate(inputs.items())
    )
    safe = (Decision("", Precision.FP8, PER_TENSOR, Verdict.SAFE, "far inside", SCALE, (1.0,)),)
    kept = [Decision("", Precision.FP32, None, verdict, "a reason") for verdict in VERDICTS]

    def decisions(plan: PrecisionPlan) -> tuple[Decision, ...]:
        known = (*safe, *kept[1:]) if plan.fp8_sites else kept
        return tuple(replace(known[i % 3], site=name) for i, name in enumerate(inputs))

    scales = {PER_TENSOR.activation_id: dict.fromkeys(inputs.values(), SCALE)}
    return replace(
        base,
        exported=model,
        modified=model,
        profile=replace(base.profile, sites=entries, scales=scales),
        plans=PlanSet(tuple(replace(plan, decisions=decisions(plan)) for plan in base.plans.plans)),
        engines=tuple(replace(e, sites=()) for e in base.engines),
    )
