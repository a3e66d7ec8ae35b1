"""The sample run with everything in it that a report can show: every table has rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from changed_run import with_differences, with_evaluations, with_plans
from sample_run import moments

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.correction import (
    BiasCorrection,
    CorrectionSet,
    OutputCorrection,
    PlanCorrections,
    Trial,
    Variant,
)
from loka_onnx.core.evaluation import Choice, Evaluation, InputPlace, PredictedTime, Route
from loka_onnx.core.evaluation import SliceDifference as Slice
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import SiteSpeed, SpeedVerdict, Wide
from loka_onnx.core.profile import Draws, Sampling, SiteGroup
from loka_onnx.core.refinement import HardwareRefinement, Origin, Refinement, Returned, Step
from loka_onnx.core.site import OtherProduct
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.core.throughput import CHOSEN, HIGH_PRECISION, Throughput, ThroughputSet
from loka_onnx.core.throughput import Trial as Load
from loka_onnx.report import ReportData

OTHER_PRODUCTS = (
    OtherProduct("history.gru", "GRU", "a recurrent layer", None),
    OtherProduct("history.conv", "Conv", "a convolution, kernel 3", 12_345),
)
TIMES = Interval(1.2537, 1.2011, 1.3098, 0.95, 10)


def rich(data: ReportData, *, sequential: bool = False) -> ReportData:
    """The same run with slices, corrections, refinement, throughput, speeds, groups and routes.

    Args:
        data: A sample run.
        sequential: Whether calibration stopped when verdicts were reached.
    """
    data = _with_profile(data, sequential)
    data = _with_evaluations(data)
    first, *rest = data.plans.plans
    plans = (replace(first, wide=(Wide("sigmoid", "kept by 'sig*'"),)), *rest)
    data = with_plans(data, plans=plans, speeds=_speeds(data), able_share=0.873)
    return replace(
        data,
        modified=replace(data.modified, other_products=OTHER_PRODUCTS),
        choice=_choice(data),
        corrections=_corrections(data),
        refinement=_refinement(),
        throughput=_throughput(data),
    )


def _with_profile(data: ReportData, sequential: bool) -> ReportData:
    draws = Draws(4, 1.13e-5, 1.92e-5, 1.5, -1e-5, 2e-5)
    histogram = MagnitudeHistogram(7, 1016, (3, 0, 12, 5))
    entries = tuple(
        replace(
            entry,
            operands={n: replace(r, histogram=histogram) for n, r in entry.operands.items()},
            sensitivities=tuple(replace(s, draws=draws) for s in entry.sensitivities),
        )
        for entry in data.profile.sites
    )
    first = entries[0].sensitivities[0]
    both = type(first).of(first.name, first.delta, moments(3e-5, 5e-7), moments(1e-6, 4e-5), draws)
    group = SiteGroup("dense", tuple(entry.site for entry in entries), (both,))
    sampling = Sampling(2000, 3, 16384, (entries[0].site,), may_stop_early=True)
    profile = replace(
        data.profile,
        sites=entries,
        groups=(group,),
        sampling=sampling if sequential else data.profile.sampling,
    )
    return replace(data, profile=profile)


def _with_evaluations(data: ReportData) -> ReportData:
    def judged(value: str | None, lower: float, upper: float, status: str = "undecided") -> Slice:
        interval = Interval((lower + upper) / 2, lower, upper, 0.999, 1000)
        return Slice("country", value, 1000, 1000, interval, interval, interval, status)

    slices = (
        judged("BR", 0.0003, 0.0009, "beyond"),
        judged(None, 0.0001, 0.0012),
        *(judged(f"c{i}", -0.001 - i / 1000, 0.002) for i in range(12)),
        Slice("country", "LI", 38, 38, None, None, None, "not judged", "38 rows, an interval needs 100 rows"),
    )
    output = {"slices": slices, "slices_left_out": {"country": 1234}}
    places = (
        (8, 81.3471, InputPlace.HOST),
        (1024, 12_345.678, InputPlace.HOST),
        (1024, 98.7654, InputPlace.DEVICE),
    )

    def timed(evaluation: Evaluation) -> Evaluation:
        latencies = tuple(
            replace(latency, batch=batch, p50_us=p50, lookup_p50_us=12.34, inputs=place)
            for latency in evaluation.latencies
            for batch, p50, place in places
        )
        return replace(evaluation, latencies=latencies)

    data = with_differences(data, output=output, delta_auc=Interval(-1.23e-5, -3e-5, 1e-5, 0.95, 2400))
    return with_evaluations(data, timed)


def _speeds(data: ReportData) -> tuple[SiteSpeed, ...]:
    times = ({"64": 1.2345, "1024": 12.3456}, {"64": 0.4321, "1024": 0.0})
    fast, slow = (SpeedVerdict.FAST, times, True), (SpeedVerdict.SLOW, times, False)
    known = (fast, slow, (SpeedVerdict.UNKNOWN, ({}, {}), False))
    return tuple(
        SiteSpeed(s.name, "nvidia-h100", verdict, *us, s.activation.tensor, is_measured, "by kernel times")
        for s, (verdict, us, is_measured) in zip(data.modified.sites, known, strict=False)
    )


def _choice(data: ReportData) -> Choice:
    first, *rest = data.choice.targets
    built = [e for e in data.engines if e.target == "cpu" and e.is_built]
    losers = tuple(replace(loser, times=TIMES, upper=1.7) for loser in first.losers)
    routes = (Route(8, built[0].id, built[0].plan), Route(64, built[1].id, built[1].plan, TIMES))
    routes += (Route(512, built[2].id, built[2].plan, Interval(1.01, 1.01, 1.01, 0.95, 1)),)
    predictions = (
        PredictedTime(built[0].id, "fp32", 8, 110.123, 100.456),
        PredictedTime(built[1].id, "fp8-safe", 64, 95.5, 100.25),
    )
    target = replace(first, losers=losers, routes=routes)
    not_predicted = {built[2].id: "FP8 at 'fc' breaks it up"}
    return Choice((target, *rest), predictions, 0.0718, not_predicted)


def _corrections(data: ReportData) -> CorrectionSet:
    def trial(variant: Variant, value: float, kl: float, constant: float = 0.0) -> Trial:
        wide = Interval(value, value - 0.0002, value + 0.0002, 0.95, 1000)
        return Trial(variant, constant, 10 * value, wide, Interval(kl, kl, kl, 0.95, 1000), wide)

    trials = (
        trial(Variant.NONE, 0.0029, 0.0021),
        trial(Variant.CONSTANT, 0.0012, 0.0020, 0.0625),
        trial(Variant.BIAS, 0.0013, 0.0019),
    )
    bias = BiasCorrection(data.modified.sites[0].name, (1, 2), (0.0123, -0.0456), 0.0789, 0.00321)
    output = OutputCorrection("ctr", OutputKind.LOGIT, trials, Variant.CONSTANT, "it helps most")
    plan = PlanCorrections("fp8-all", 32_768, (bias,), {"dot": "a product of two activations"}, (output,))
    return CorrectionSet((plan,))


def _refinement() -> Refinement:
    def step(number: int, plan: str, **changes: Any) -> Step:
        first = Step(
            round=number,
            plan=plan,
            engine=f"gpu-trt-{plan}",
            origin=Origin.RUN_FILE,
            parent="",
            returned=(),
            fp8_sites=3,
            fp8_share=0.5123,
            status="built and run here",
            detail="",
            build_seconds=40.123,
            latency_us={"8": 80.1234, "64": 12_000.5},
            predicted_us={"8": 90.4321, "64": 11_000.25, "512": 3.0},
            predicted_from="gpu-trt-bf",
            times=TIMES,
            upper=1.4123,
            is_within=False,
            is_on_front=True,
        )
        return replace(first, **changes)

    returned = (Returned(("fc1", "fc2"), 0.8123, 0.0125), Returned(("fc3",), 0.1, None))
    given = step(1, "refined", origin=Origin.GIVEN_BACK, parent="whole", returned=returned, is_within=True)
    failed = step(1, "broken", latency_us={}, times=None, upper=None, detail="signal (SIGSEGV)")
    steps = (step(0, "whole"), given, failed)
    hardware = HardwareRefinement("gpu", "hopper", "trt", "gpu-trt-bf", steps, "refined", "done", 90.12)
    predictions = tuple(p for each in steps for p in each.predictions)
    return Refinement((hardware,), predictions, 0.1037)


def _throughput(data: ReportData) -> ThroughputSet:
    def measured(engine: str, role: str, rate: float, failure: str = "") -> Throughput:
        load = Load(rate, 5000, 400.123, 900.456, 0.005, 0.00812, 150.2, True)
        return Throughput(
            engine=engine,
            plan="fp32",
            target="cpu",
            role=role,
            batch=512,
            streams=2,
            p99_limit_us=1000.0,
            confidence=0.95,
            seed=0,
            capacity_per_s=1.2345 * rate,
            requests_per_s=rate,
            trials=(load,) if rate else (),
            failure=failure,
        )

    ours, other, third, *_ = (engine.id for engine in data.engines)
    failed = measured(third, HIGH_PRECISION, 0.0, "the worker died")
    return ThroughputSet((measured(ours, CHOSEN, 3012.34), measured(other, HIGH_PRECISION, 2001.23), failed))
