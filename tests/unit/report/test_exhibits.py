"""What the page draws: quadrants, histograms and charts, against the facts."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
from sample_run import SampleRun

from loka_onnx.core.evaluation import EvaluationSet, Latency
from loka_onnx.core.histogram import MagnitudeHistogram
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.site import SiteKind
from loka_onnx.report import ReportData
from loka_onnx.report.chart import charts
from loka_onnx.report.histograms import activation_table, histogram_data
from loka_onnx.report.site_tables import sites_section
from loka_onnx.report.speed_tables import SPEEDS, quadrants, speed_texts


def speed(site: str, verdict: SpeedVerdict, device: str = "gpu", measured: bool = True) -> SiteSpeed:
    return SiteSpeed(site, device, verdict, {}, {}, "dense", measured, "times")


def with_speeds(data: ReportData, *speeds: SiteSpeed) -> ReportData:
    return dataclasses.replace(data, plans=PlanSet(data.plans.plans, (), speeds))


def counts(data: ReportData) -> dict[tuple[Verdict, str], tuple[str, ...]]:
    (found,) = quadrants(data)
    return {(q.accuracy, q.speed): q.sites for row in found.rows for q in row if q.sites}


def test_every_site_is_in_one_quadrant_and_what_was_not_timed_is_not_guessed(sample: SampleRun) -> None:
    names = [site.name for site in sample.report.modified.sites]
    data = with_speeds(
        sample.report, speed(names[0], SpeedVerdict.FAST), speed(names[1], SpeedVerdict.UNKNOWN)
    )
    assert counts(data) == {
        (Verdict.SAFE, "fast"): (names[0],),
        (Verdict.UNSAFE, "not measured"): (names[1],),
        (Verdict.NOT_JUDGED, "not measured"): (names[2],),
    }
    assert all(speed == "not measured" for _, speed in counts(sample.report))


def test_the_four_quadrants_stand_there_when_they_are_empty(sample: SampleRun) -> None:
    (found,) = quadrants(sample.report)
    assert [tuple(q.speed for q in row) for row in found.rows] == [SPEEDS] * 3
    assert [row[0].accuracy for row in found.rows] == [Verdict.SAFE, Verdict.UNSAFE, Verdict.NOT_JUDGED]
    assert found.caption.endswith("no speed was measured or predicted")
    rows = [tuple(cell.text for cell in row[:3]) for row in found.table().rows]
    assert ("safe", "fast", "0") in rows and ("unsafe", "slow", "0") in rows


def test_shares_are_those_of_one_model_whatever_mods_padded(sample: SampleRun) -> None:
    first, *rest = sample.report.modified.sites
    padded = dataclasses.replace(sample.report.modified, sites=(dataclasses.replace(first, k=20), *rest))
    data = dataclasses.replace(sample.report, modified=padded)
    flops = [2 * site.k * site.n for site in padded.sites[:2]]
    expected = [f"{100 * f / sum(flops):.1f} %" for f in flops]
    section = sites_section(data)
    (table,) = (t for t in section.tables if t.caption.startswith("Sites in plan"))
    place = [column.title for column in table.columns].index("FLOP share")
    assert [row[place].text for row in table.rows] == [*expected, "–"]
    (found,) = quadrants(data)
    assert {q.flop_share for row in found.rows for q in row if q.sites} == {*expected, "0.0 %"}
    assert "of the model after mods" in " ".join(section.paragraphs)


def test_norms_are_no_question_of_fp8(sample: SampleRun) -> None:
    first, *rest = sample.report.modified.sites
    norm = dataclasses.replace(first, kind=SiteKind.NORM)
    model = dataclasses.replace(sample.report.modified, sites=(norm, *rest))
    data = dataclasses.replace(sample.report, modified=model)
    assert first.name not in [name for names in counts(data).values() for name in names]


def test_each_device_has_its_quadrants_and_predictions_are_told_apart(sample: SampleRun) -> None:
    name = sample.report.modified.sites[0].name
    data = with_speeds(
        sample.report,
        speed(name, SpeedVerdict.FAST, "gpu", measured=False),
        speed(name, SpeedVerdict.SLOW, "cpu"),
    )
    gpu, cpu = quadrants(data)
    assert (gpu.device, cpu.device) == ("gpu", "cpu")
    assert (gpu.rows[0][0].predicted, cpu.rows[0][1].predicted) == ("1", "")
    assert speed_texts(data) == {name: "gpu: fast; cpu: slow"}


def drawn(data: ReportData) -> ReportData:
    """With a histogram for the first site."""
    first, *rest = data.profile.sites
    histogram = MagnitudeHistogram(5, 1000, (3, 0, 2))
    operands = {n: dataclasses.replace(s, histogram=histogram) for n, s in first.operands.items()}
    profile = dataclasses.replace(data.profile, sites=(dataclasses.replace(first, operands=operands), *rest))
    return dataclasses.replace(data, profile=profile)


def test_bounds_are_those_at_which_the_format_rounds(sample: SampleRun) -> None:
    import ml_dtypes

    data = drawn(sample.report)
    found = histogram_data(data, data.plan("fp8-safe"))
    (activation,) = found["sites"][0]["activations"]
    zero, normal, largest = (2**bound for bound in activation["bounds"])
    scale = 6.0 / 448

    def rounded(magnitude: float) -> float:
        return float(np.float32(magnitude / scale).astype(ml_dtypes.float8_e4m3fn))

    assert rounded(zero * 0.999) == 0.0 < rounded(zero * 1.001)
    assert rounded(normal) == float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).smallest_normal)
    assert rounded(largest) == float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def test_each_tensor_is_once_in_the_page_and_every_site_is_named(sample: SampleRun) -> None:
    data = drawn(sample.report)
    found = histogram_data(data, data.plan("fp8-safe"))
    assert [site["name"] for site in found["sites"]] == [site.name for site in data.modified.sites]
    assert found["tensors"]["dense"] == {"first": 1000, "counts": (3, 0, 2), "total": 10}
    assert set(found["tensors"]) == {"dense", "r0"}
    assert found["sites"][2]["activations"] == []
    assert found["sites"][1]["verdict"] == "unsafe"
    json.dumps(found, allow_nan=False)


def test_counted_shares_are_those_of_the_error_pass(sample: SampleRun) -> None:
    table = activation_table(sample.report, sample.report.plan("fp8-safe"))
    titles = [column.title for column in table.columns]
    row = dict(zip(titles, (cell.text for cell in table.rows[0]), strict=True))
    # 5 of 1000 became zero, 2 saturated.
    assert (row["Underflowed to zero"], row["Saturated"], row["Zeros"]) == ("0.5 %", "0.2 %", "0 %")
    assert row["Scale"] == "0.0134"


def timed(data: ReportData) -> ReportData:
    """Every evaluation gets a latency of its own; engines are not simulated."""
    evaluations = tuple(
        dataclasses.replace(e, latencies=(Latency(64, 100.0 - i, 1.0, 1.0, 9, "cpu", True),))
        for i, e in enumerate(data.evaluations.evaluations)
    )
    engines = tuple(dataclasses.replace(e, simulated=False) for e in data.engines)
    return dataclasses.replace(data, engines=engines, evaluations=EvaluationSet(evaluations))


def test_every_candidate_is_a_point_or_is_named(sample: SampleRun) -> None:
    for data in (sample.report, timed(sample.report)):
        for chart in charts(data):
            points = [
                name for trace in (chart.figure or {"data": ()})["data"] for name in trace.get("text", ())
            ]
            engines = [e for e in data.engines if chart.kind == "share" or chart.name == f"ctr on {e.target}"]
            assert len(points) + len(chart.left_out) == len(engines)


def test_points_stand_at_their_latency_and_change(sample: SampleRun) -> None:
    data = timed(sample.report)
    chart = next(c for c in charts(data) if c.name == "ctr on cpu")
    found = {
        (trace["x"][i], trace["y"][i])
        for trace in chart.figure["data"]
        if "hovertext" in trace
        for i in range(len(trace["x"]))
    }
    wanted = {
        (e.latencies[0].p50_us, 100 * e.outputs[0].difference.delta_ne.value)
        for e in data.evaluations.evaluations
        if e.split == "selection" and e.outputs[0].difference is not None
    }
    # A certified engine was timed twice here; the last time counts.
    assert {y for _, y in found} == {y for _, y in wanted}
    assert len(found) == 3
    emitted = next(trace for trace in chart.figure["data"] if trace["name"] == "emitted")
    assert emitted["y"] == [0.0]


def test_what_was_timed_on_another_device_only_says_where(sample: SampleRun) -> None:
    data = timed(sample.report)
    there = "cpu-onnxruntime-cpu-fp8-all"

    def left_out(batch: int, *elsewhere: str) -> list[str]:
        evaluations = tuple(
            dataclasses.replace(
                e, latencies=(Latency(batch if e.engine == there else 64, 9.0, 9.0, 9.0, 9, "H200", False),)
            )
            if e.engine in elsewhere
            else e
            for e in data.evaluations.evaluations
        )
        changed = dataclasses.replace(data, evaluations=EvaluationSet(evaluations))
        chart = next(c for c in charts(changed) if c.name == "ctr on cpu")
        return [line for line in chart.left_out if line.startswith(there)]

    assert left_out(64, there) == [f"{there}: timed on H200, not the target"]
    assert left_out(8, there) == [f"{there}: not timed at this batch"]
    # Nothing was timed on the target: there is no batch that it could have been timed at.
    every = {e.engine for e in data.evaluations.evaluations}
    assert left_out(8, *every) == [f"{there}: timed on H200, not the target"]


def test_long_latencies_are_in_milliseconds(sample: SampleRun) -> None:
    data = timed(sample.report)
    slow = tuple(
        dataclasses.replace(e, latencies=(Latency(64, 25_000.0, 1.0, 1.0, 9, "cpu", True),))
        for e in data.evaluations.evaluations
    )
    chart = next(
        c
        for c in charts(dataclasses.replace(data, evaluations=EvaluationSet(slow)))
        if c.name == "ctr on cpu"
    )
    assert chart.figure["layout"]["xaxis"]["title"]["text"] == "latency p50 at batch 64, ms"
    assert chart.figure["data"][0]["x"][0] == 25.0


def test_an_interval_without_an_end_is_no_point(sample: SampleRun) -> None:
    endless = Interval(0.0, -math.inf, math.inf, 0.95, 1)
    evaluations = tuple(
        dataclasses.replace(
            e,
            outputs=tuple(
                dataclasses.replace(o, difference=dataclasses.replace(o.difference, delta_ne=endless))
                if o.difference is not None
                else o
                for o in e.outputs
            ),
        )
        for e in sample.report.evaluations.evaluations
    )
    data = dataclasses.replace(sample.report, evaluations=EvaluationSet(evaluations))
    assert all(chart.figure is None for chart in charts(data))
