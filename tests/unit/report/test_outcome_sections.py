"""Rows of the choice, of refining, throughput, corrections and latency, against the facts of `rich_run`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich_run import rich
from sample_run import SampleRun

from loka_onnx.core.correction import CorrectionSet, PlanCorrections, Variant
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet, InputPlace, Latency, median_error
from loka_onnx.core.refinement import Refinement
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.report.data import ReportData
from loka_onnx.report.engine_tables import fallbacks_section, latency_tables
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.sections import build_document

FP32, SAFE, ALL = (f"cpu-onnxruntime-cpu-{plan}" for plan in ("fp32", "fp8-safe", "fp8-all"))
TIMES = "1.254× [1.201, 1.310]"


def shown(data: ReportData) -> str:
    """The report as one line, without what Markdown escapes."""
    return " ".join(to_markdown(build_document(data)).replace("\\", "").split())


@pytest.fixture
def data(sample: SampleRun) -> ReportData:
    return rich(sample.report)


def test_the_choice_refining_and_throughput_are_told_row_by_row(data: ReportData) -> None:
    text = shown(data)
    for row in (
        f"| up to 8 | {FP32} | fp32 | – |",
        f"| 9 to 64 | {SAFE} | fp8-safe | {TIMES} |",
        f"| 65 and more | {ALL} | fp8-all | 1.010× |",
        f"By batch size: to 8 rows {FP32}; to 64 rows {SAFE}; to 512 rows {ALL}.",
        f"| {SAFE} | simulated | {TIMES} | 1.70× |",
        "Median error of 2 latencies predicted: 7.18 %.",
        f"No latency is predicted of '{ALL}': FP8 at 'fc' breaks it up.",
        f"{ALL} at batch 512: the worker died",
        f"cpu at batch 512: the chosen engine answers 1.51× the requests of {SAFE}",
        f"| {FP32} | 512 | chosen | on the host | 2 | 1000.0 µs | 3,012.3 | 1,542,318 | 400.1 µs | 900.5 µs "
        "| 0.81 % | 3,718.7 | 150.2 µs |",
        f"| {ALL} | 512 | best without FP8 | on the host | 2 | 1000.0 µs | not measured | – |",
        "Predicted against measured latency of every plan tried: median error 10.4 %, 4 times.",
        "gpu, trt hopper: 1 rounds in 90.1 s, ended because done; 'refined' is the fastest inside the budget",
        f"| **1** | refined | whole, 3 given back | 51.2 % | {TIMES} | 1.41× | yes | 40.1 s |",
        "| 1 | broken | run file | 51.2 % | not measured | not measured |",
        "| signal (SIGSEGV) |",
    ):
        assert row in text
    assert data.chosen(SAFE) is data.choice.targets[0]
    assert median_error(data.choice.predictions) == pytest.approx(0.0718, abs=1e-4)


def test_what_there_is_not_is_not_told(sample: SampleRun, data: ReportData) -> None:
    (hardware,) = data.refinement.hardware
    away = replace(hardware, anchor="", steps=())
    nothing = replace(sample.report, refinement=Refinement((away,)), choice=Choice(()))
    titles = [section.title for section in build_document(nothing).sections]
    assert not {"Choice", "Refinement", "Throughput", "Corrections", "Slices"} & set(titles)
    measured, *_, failed = data.throughput.measurements
    slow = replace(measured, requests_per_s=0.0, trials=())
    none = replace(data, throughput=ThroughputSet((slow, failed)))
    assert none.throughput.gains == ()
    assert f"| {FP32} | 512 | chosen | on the host | 2 | 1000.0 µs | none is low enough | – |" in shown(none)
    step = replace(hardware.steps[0], predicted_us={}, predicted_from="", not_predicted="FP8 breaks it up")
    unknown = Refinement((replace(hardware, steps=(step,)),))
    assert "No latency is predicted of 'whole': FP8 breaks it up." in shown(replace(data, refinement=unknown))


def test_every_correction_is_shown_with_what_was_kept(data: ReportData) -> None:
    (plan,) = data.corrections.plans
    (output,) = plan.outputs
    unlabelled = replace(output.trials[0], delta_ne=None, labelled=None)
    other = replace(output, output="cvr", trials=(unlabelled,), accepted=Variant.NONE, reason="nothing helps")
    plans = (plan, PlanCorrections("fp8-safe", 32_768, (), {}, (other,)))
    document = build_document(replace(data, corrections=CorrectionSet(plans)))
    (section,) = [s for s in document.sections if s.anchor == "corrections"]
    (variants,) = section.tables
    rows = [[cell.text for cell in row] for row in variants.rows]
    change, kl = "+0.290 % [+0.270 %, +0.310 %]", "+0.21 % [+0.21 %, +0.21 %]"
    assert rows[0] == ["fp8-all", "ctr", "none", "no", "–", "+0.029", change, kl, "it helps most"]
    assert rows[1][:5] == ["fp8-all", "ctr", "output constant", "yes", "+0.0625"] and rows[1][8] == ""
    assert rows[2][:4] == ["fp8-all", "ctr", "biases", "no"]
    assert rows[3][:4] == ["fp8-safe", "cvr", "none", "yes"] and rows[3][6] == "–"
    assert variants.emphasized == {1, 3}
    assert section.items == ("fp8-all: dot has no corrected bias: a product of two activations",)


FIRST = Latency(8, 1.0, 2.0, 3.0, 100, "NVIDIA H100 80GB HBM3", True)


def timed(data: ReportData, *latencies: Latency) -> list[list[list[str]]]:
    """The rows of each table of latency, of one engine that is evaluated on two splits."""
    engine = next(e for e in data.engines if not e.simulated)
    known = (engine.id, "trt", engine.plan, engine.target)
    evaluations = tuple(
        Evaluation(*known, split, 9, (), latencies, "measured") for split in ("selection", "certification")
    )
    tables = latency_tables(replace(data, evaluations=EvaluationSet(evaluations)))
    return [[[cell.text for cell in row] for row in table.rows] for table in tables]


def test_the_load_stands_beside_latencies_of_a_busy_host(data: ReportData) -> None:
    quiet, busy = replace(FIRST, host_load=1.0), replace(FIRST, batch=64, host_load=3.21)
    ((plain,),) = timed(data, quiet)
    ((first, second),) = timed(data, quiet, busy)
    assert (len(first), first[-2], second[-2]) == (len(plain) + 1, "1.0", "3.2")


def test_each_place_of_inputs_has_a_table_in_which_a_measurement_stands_once(data: ReportData) -> None:
    there = replace(FIRST, inputs=InputPlace.DEVICE, p50_us=0.5)
    elsewhere = replace(FIRST, batch=64, device="NVIDIA H100 PCIe", counts_for_choice=False)
    host, device = timed(data, FIRST, there, elsewhere)
    times = ["1.0 µs", "2.0 µs", "3.0 µs", "100"]
    assert [row[1:] for row in host] == [
        [FIRST.device, "8", *times, "yes"],
        [elsewhere.device, "64", *times, "no, another device than the target"],
    ]
    assert [row[3] for row in device] == ["0.5 µs"]
    assert timed(data) == []


def test_what_failed_or_was_left_out_is_listed_with_the_reason(data: ReportData) -> None:
    failed = tuple(replace(e, latency_failure="the worker died") for e in data.evaluations.evaluations)
    assert "Timing failed: the worker died" in shown(replace(data, evaluations=EvaluationSet(failed)))
    engine = replace(data.engines[0], remarks=("a fusion was left out: no kernel",))
    (table,) = [
        table
        for table in fallbacks_section(replace(data, engines=(engine,))).tables
        if table.caption == "What engine makers left out"
    ]
    assert [cell.text for cell in table.rows[0]] == [engine.id, "a fusion was left out: no kernel"]
