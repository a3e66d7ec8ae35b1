"""Runs that a small host cannot make: an FP8 engine that was measured and won; and a model of many sites."""

from __future__ import annotations

import dataclasses

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
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.site import Site
from loka_onnx.core.statistics import MagnitudeHistogram, RangeStats
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
MAIN, ROUTED = "gpu-onnxruntime-sm90-bf16", "gpu-onnxruntime-sm90-fp8-safe"
HARM = Interval(0.0006, 0.0003, 0.0009, 0.999, 100)


def decided(base: ReportData) -> ReportData:
    """The sample run with a target where FP8 is fast, and its site speeds.

    The engine of fp8-safe is inside the budget and wins, that of fp8-all is faster and beyond it, that of
    bf16 is slower; one of fp32 was timed too.
    """
    judged = {"fp32": 0.0, "bf16": 2e-5, "fp8-safe": DELTA.value, "fp8-all": 9e-4}
    engines = [_engine(base, plan) for plan in judged]
    bf16 = dataclasses.replace(base.plan("fp32"), id="bf16", base=Precision.BF16)
    plans = (*base.plans.plans, bf16)
    evaluations = [_evaluation(base, engine, judged[engine.plan]) for engine in engines]
    emitted = next(e for e in engines if e.plan == "fp8-safe")
    evaluations.append(_certified(_evaluation(base, emitted, DELTA.value)))
    why = {"fp32": Why.SLOWER, "bf16": Why.SLOWER, "fp8-all": Why.BEYOND}
    times = {"fp32": OVER_FP32, "bf16": OVER_BF16, "fp8-all": None}
    others = (e for e in engines if e is not emitted)
    losers = tuple(Rejection(e.id, why[e.plan], f"{why[e.plan]}", times[e.plan], 0.4) for e in others)
    choice = TargetChoice("gpu", emitted.id, "fp8-safe", "fastest inside", "measured on the target", losers)
    return dataclasses.replace(
        base,
        engines=(*engines, *base.engines),
        evaluations=EvaluationSet((*evaluations, *base.evaluations.evaluations), "2026-11-27"),
        plans=PlanSet(plans, base.plans.notes, _speeds(base)),
        choice=Choice((choice, *base.choice.targets)),
        profile=_with_histograms(dataclasses.replace(base.profile, synthetic=False)),
        data=dataclasses.replace(base.data, synthetic=False),
    )


def routed(base: ReportData, plan: str = "fp8-safe") -> ReportData:
    """The main engine is BF16; requests of more than 256 rows go to one in FP8."""
    routes = (Route(256, MAIN, "bf16"), Route(1024, f"gpu-onnxruntime-sm90-{plan}", plan, OVER_FP32))
    return with_target(decided(base), engine=MAIN, plan="bf16", routes=routes)


def _engine(base: ReportData, plan: str) -> EngineArtifact:
    first = base.engines[0]
    return dataclasses.replace(first, plan=plan, target="gpu", architecture="sm90", simulated=False, sites=())


def _evaluation(base: ReportData, engine: EngineArtifact, value: float) -> Evaluation:
    model = next(e for e in base.evaluations.evaluations if e.plan == "fp8-safe" and e.outputs)
    (output,) = model.outputs
    half = (DELTA.upper - DELTA.lower) / 2
    delta = Interval(value, value - half, value + half, 0.95, 1600)
    status = "within" if delta.upper <= output.budget else "beyond"
    difference = dataclasses.replace(output.difference, delta_ne=delta)
    output = dataclasses.replace(output, difference=difference, budget_status=status, rows_to_decide=None)
    latency = Latency(BATCH, LATENCIES_US[engine.plan], 150.0, 190.0, 200, "H100", True)
    names = (engine.id, engine.backend, engine.plan, engine.target, "selection")
    return Evaluation(*names, 2400, (output,), (latency,), "measured")


def _certified(evaluation: Evaluation) -> Evaluation:
    """The same on certification, with a curve of two bins and quantiles, timed on a busy host."""
    (output,), (latency,) = evaluation.outputs, evaluation.latencies
    output = dataclasses.replace(output, calibration=CURVE, drift=DRIFT)
    latency = dataclasses.replace(latency, host_load=2.5)
    return dataclasses.replace(evaluation, split="certification", outputs=(output,), latencies=(latency,))


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
    def drawn(entry: SiteProfile, seed: int) -> SiteProfile:
        changes = {"histogram": histogram(seed)}
        operands = {name: dataclasses.replace(s, **changes) for name, s in entry.operands.items()}
        return dataclasses.replace(entry, operands=operands)

    return dataclasses.replace(profile, sites=tuple(map(drawn, profile.sites, range(len(profile.sites)))))


def large(base: ReportData, sites: int) -> ReportData:
    """The same run over a model with so many sites, each with a histogram of its own."""
    first, entry = base.modified.sites[0], base.profile.sites[0]
    (stats,) = entry.operands.values()
    names = [f"tower.{i // 10:03d}.fc{i % 10}" for i in range(sites)]
    model = dataclasses.replace(base.modified, sites=tuple(_site(first, name) for name in names))
    entries = tuple(_profiled(entry, stats, name, seed) for seed, name in enumerate(names))
    scales = {PER_TENSOR.activation_id: {f"{name}:in": SCALE for name in names}}
    plans = tuple(_plan(plan, names) for plan in base.plans.plans)
    return dataclasses.replace(
        base,
        exported=model,
        modified=model,
        profile=dataclasses.replace(base.profile, sites=entries, scales=scales),
        plans=PlanSet(plans),
        engines=tuple(dataclasses.replace(e, sites=()) for e in base.engines),
    )


def _site(first: Site, name: str) -> Site:
    activation, weight = first.operands
    operands = (dataclasses.replace(activation, tensor=f"{name}:in"), weight)
    return dataclasses.replace(first, name=name, operands=operands)


def _profiled(entry: SiteProfile, stats: RangeStats, name: str, seed: int) -> SiteProfile:
    operands = {f"{name}:in": dataclasses.replace(stats, histogram=histogram(seed))}
    return dataclasses.replace(entry, site=name, operands=operands)


def _plan(plan: PrecisionPlan, names: list[str]) -> PrecisionPlan:
    decisions = []
    for index, name in enumerate(names):
        verdict = (Verdict.SAFE, Verdict.UNSAFE, Verdict.UNDECIDED)[index % 3]
        if plan.fp8_sites and verdict is Verdict.SAFE:
            decisions.append(Decision(name, Precision.FP8, PER_TENSOR, verdict, "far inside", SCALE, (1.0,)))
        else:
            decisions.append(Decision(name, plan.base, None, verdict, f"reason {index}"))
    return dataclasses.replace(plan, decisions=tuple(decisions))
