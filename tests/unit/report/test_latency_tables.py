"""What the report says of latencies: where they were measured, with inputs where, and what failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_run import SampleRun

from loka_onnx.core.evaluation import Evaluation, EvaluationSet, InputPlace, Latency
from loka_onnx.report.data import ReportData
from loka_onnx.report.engine_tables import fallbacks_section, latency_tables

FIRST = Latency(8, 1.0, 2.0, 3.0, 100, "NVIDIA H100 80GB HBM3", True)


@pytest.fixture
def data(sample: SampleRun) -> ReportData:
    return sample.report


def timed(data: ReportData, **changes: object) -> ReportData:
    engine = next(e for e in data.engines if not e.simulated)
    judged = Evaluation(engine.id, "trt", engine.plan, engine.target, "selection", 9, (), (), "measured")
    return replace(data, evaluations=EvaluationSet((replace(judged, **changes),)))  # type: ignore[arg-type]


def test_each_place_of_inputs_has_a_table_of_its_own(data: ReportData) -> None:
    there = replace(FIRST, inputs=InputPlace.DEVICE, p50_us=0.5)
    host, device = latency_tables(timed(data, latencies=(FIRST, there)))
    assert host.caption == (
        "Latency per batch size, inputs in host memory, the copies to the device and back included"
    )
    assert device.caption == "Latency per batch size, inputs on the device already, the engine alone"
    place = [column.title for column in host.columns].index("p50")
    assert [row[place].text for row in host.rows] == ["1.0 µs"]
    assert [row[place].text for row in device.rows] == ["0.5 µs"]


def test_what_was_timed_stands_once_though_it_is_in_the_evaluations_of_both_splits(data: ReportData) -> None:
    certified = {e.engine for e in data.evaluations.evaluations if e.split == "certification" and e.latencies}
    selected = {e.engine for e in data.evaluations.evaluations if e.split == "selection" and e.latencies}
    assert certified & selected
    (table,) = latency_tables(data)
    assert [[item.text for item in row[:4]] for row in table.rows] == [
        [engine, "cpu", "1,024", "123.4 µs"] for engine in sorted(certified | selected)
    ]


def test_the_device_is_named_and_another_one_said_not_to_count(data: ReportData) -> None:
    elsewhere = replace(FIRST, device="NVIDIA H200", counts_for_choice=False)
    (table,) = latency_tables(timed(data, latencies=(FIRST, elsewhere)))
    assert [(row[1].text, row[-1].text) for row in table.rows] == [
        ("NVIDIA H100 80GB HBM3", "yes"),
        ("NVIDIA H200", "no, another device than the target"),
    ]


def test_what_failed_while_it_was_timed_is_listed(data: ReportData) -> None:
    (table,) = latency_tables(timed(data, latency_failure="at batch 8: the worker died"))
    assert table.caption == "Engines that failed while they were timed"
    assert [row[1].text for row in table.rows] == ["at batch 8: the worker died"]
    assert not [*latency_tables(timed(data))]


def test_what_a_maker_left_out_is_listed_with_the_reason(data: ReportData) -> None:
    assert all("left out" not in table.caption for table in fallbacks_section(data).tables)
    remark = "token-residual-norm: norm/3: 40000 elements"
    first, *others = data.engines
    told = fallbacks_section(replace(data, engines=(replace(first, remarks=(remark,)), *others)))
    table = told.tables[-1]
    assert table.caption == "What engine makers left out"
    assert [[item.text for item in row] for row in table.rows] == [[first.id, remark]]
