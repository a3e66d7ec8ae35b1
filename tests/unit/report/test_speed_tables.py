"""What the report says of the choice, of refining and of throughput."""

from __future__ import annotations

import dataclasses

import pytest
from sample_run import SampleRun

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice, PredictedTime, Route, median_error
from loka_onnx.core.intervals import Interval
from loka_onnx.core.refinement import HardwareRefinement, Origin, Refinement, Returned, Step
from loka_onnx.core.throughput import CHOSEN, HIGH_PRECISION, Throughput, ThroughputSet, Trial
from loka_onnx.report import ReportData
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.sections import build_document

TIMES = Interval(1.25, 1.2, 1.3, 0.95, 10)


def shown(data: ReportData) -> str:
    """The report as one line, without what Markdown escapes."""
    assert serde.loads(ReportData, serde.dumps(data)) == data
    return " ".join(to_markdown(build_document(data)).replace("\\", "").split())


@pytest.fixture
def data(sample: SampleRun) -> ReportData:
    return sample.report


def with_choice(data: ReportData, **changes: object) -> ReportData:
    first, *rest = data.choice.targets
    losers = tuple(dataclasses.replace(loser, times=TIMES, upper=1.7) for loser in first.losers)
    target = dataclasses.replace(first, losers=losers, **changes)
    return dataclasses.replace(data, choice=dataclasses.replace(data.choice, targets=(target, *rest)))


def test_losers_have_their_reason_time_and_bound(data: ReportData) -> None:
    text = shown(with_choice(data))
    loser = data.choice.targets[0].losers[0]
    assert f"| {loser.engine} | {loser.why} | 1.250× [1.200, 1.300] | 1.70× |" in text
    assert "Which engine takes which requests" not in text


def test_routes_are_told_with_what_they_gain(data: ReportData) -> None:
    first, second, *_ = (engine for engine in data.engines if engine.target == "cpu" and engine.is_built)
    routes = (Route(8, first.id, first.plan), Route(64, second.id, second.plan, TIMES))
    routed = with_choice(data, engine=first.id, plan=first.plan, routes=routes)
    text = shown(routed)
    assert f"| up to 8 | {first.id} | {first.plan} | – |" in text
    assert f"| 9 and more | {second.id} | {second.plan} | 1.250× [1.200, 1.300] |" in text
    assert f"By batch size: to 8 rows {first.id}; to 64 rows {second.id}." in text
    # Both are emitted.
    assert routed.chosen(second.id) is routed.choice.targets[0]


def test_predictions_come_with_their_median_error(data: ReportData) -> None:
    predictions = (
        PredictedTime("a", "fp8-all", 8, 110.0, 100.0),
        PredictedTime("a", "fp8-all", 64, 95.0, 100.0),
        PredictedTime("b", "fp8-safe", 8, 300.0, 200.0),
    )
    assert median_error(predictions) == pytest.approx(0.1)
    choice = Choice(data.choice.targets, predictions, median_error(predictions))
    text = shown(dataclasses.replace(data, choice=choice))
    assert "Predicted and measured latency, median error 10 %" in text
    assert "| a | 64 | 95.0 µs | 100.0 µs | -5.0 % |" in text
    assert "No latency is predicted" not in text


def test_what_has_no_prediction_says_why(data: ReportData) -> None:
    choice = Choice(data.choice.targets, not_predicted={"gpu-trt-fp8-all": "FP8 at 'fc' breaks it up"})
    text = shown(dataclasses.replace(data, choice=choice))
    assert "No latency is predicted of 'gpu-trt-fp8-all': FP8 at 'fc' breaks it up." in text
    tried = step(0, "fp8-all", predicted_us={}, predicted_from="", not_predicted="FP8 at 'fc' breaks it up")
    hardware = HardwareRefinement("gpu", "sm90", "trt", "gpu-trt-sm90-bf16", (tried,), "", "done", 90.0)
    text = shown(dataclasses.replace(data, refinement=Refinement((hardware,))))
    assert "No latency is predicted of 'fp8-all': FP8 at 'fc' breaks it up." in text


def step(round_number: int, plan: str, **changes: object) -> Step:
    first = Step(
        round=round_number,
        plan=plan,
        engine=f"gpu-trt-sm90-{plan}",
        origin=Origin.RUN_FILE,
        parent="",
        returned=(),
        fp8_sites=3,
        fp8_share=0.5,
        status="built and run here",
        detail="",
        build_seconds=40.0,
        latency_us={"8": 80.0},
        predicted_us={"8": 90.0},
        predicted_from="gpu-trt-sm90-bf16",
        times=Interval(0.8, 0.79, 0.81, 0.95, 10),
        upper=1.4,
        is_within=False,
        is_on_front=True,
    )
    return dataclasses.replace(first, **changes)


def test_every_step_of_refining_is_shown(data: ReportData) -> None:
    returned = (Returned(("fc1", "fc2"), 0.8, 0.0125), Returned(("fc3",), 0.1, None))
    given = step(
        1,
        "refined-1",
        origin=Origin.GIVEN_BACK,
        parent="fp8-all",
        returned=returned,
        upper=0.9,
        is_within=True,
    )
    failed = step(
        1, "refined-2", latency_us={}, times=None, upper=None, is_on_front=False, detail="signal 11 (SIGSEGV)"
    )
    hardware = HardwareRefinement(
        "gpu",
        "sm90",
        "trt",
        "gpu-trt-sm90-bf16",
        (step(0, "fp8-all"), given, failed),
        "refined-1",
        "done",
        90.0,
    )
    away = HardwareRefinement("cpu", "", "", "", (), "", "no engine here runs FP8", 0.0)
    found = Refinement((hardware, away), (PredictedTime("a", "b", 8, 90.0, 100.0),), 0.1)
    text = shown(dataclasses.replace(data, refinement=found))
    assert "gpu, trt sm90: 1 rounds in 90.0 s, ended because done; 'refined-1' is the fastest inside" in text
    assert "fp8-all, 3 given back" in text
    assert "0.800× [0.790, 0.810]" in text
    assert "signal 11 (SIGSEGV)" in text
    assert "| refined-1 | fc1, fc2 | 80.0 % | 12.5 ns |" in text
    assert "| refined-1 | fc3 | 10.0 % | – |" in text
    assert "Predicted against measured latency of every plan tried: median error 10 %, 1 times." in text
    assert "| refined-1 | gpu-trt-sm90-bf16 | 8 | 90.0 µs | 80.0 µs | +12.5 % |" in text
    assert "| refined-2 | gpu-trt-sm90-bf16 |" not in text
    # Where nothing was refined there is nothing to tell.
    assert "Refinement" not in shown(dataclasses.replace(data, refinement=Refinement((away,))))


def measured(engine: str, role: str, rate: float, failure: str = "") -> Throughput:
    trial = Trial(rate, 5000, 400.0, 900.0, 0.005, 0.008, 150.0, True)
    return Throughput(
        engine=engine,
        plan="p",
        target="gpu",
        role=role,
        batch=512,
        streams=2,
        p99_limit_us=1000.0,
        confidence=0.95,
        seed=0,
        capacity_per_s=1.2 * rate,
        requests_per_s=rate,
        trials=(trial,) if rate else (),
        failure=failure,
    )


def test_throughput_and_what_the_chosen_engine_gains(data: ReportData) -> None:
    found = ThroughputSet((measured("a", CHOSEN, 3000.0), measured("b", HIGH_PRECISION, 2000.0)))
    (gain,) = found.gains
    assert (gain.engine, gain.other, gain.ratio) == ("a", "b", 1.5)
    text = shown(dataclasses.replace(data, throughput=found))
    assert "gpu at batch 512: the chosen engine answers 1.50× the requests of b" in text
    assert (
        "| a | 512 | chosen | on the host | 2 | 1000.0 µs | 3,000.0 | 1,536,000 | 400.0 µs | 900.0 µs "
        "| 0.80 % |"
    ) in text


def test_an_engine_without_a_rate_is_no_ratio(data: ReportData) -> None:
    none, failed = measured("b", HIGH_PRECISION, 0.0), measured("a", CHOSEN, 0.0, "the worker died")
    found = ThroughputSet((failed, none))
    assert found.gains == ()
    text = shown(dataclasses.replace(data, throughput=found))
    assert "a at batch 512: the worker died" in text
    assert "| b | 512 | best without FP8 | on the host | 2 | 1000.0 µs | none is low enough | – |" in text
    assert "Throughput" not in shown(data)
