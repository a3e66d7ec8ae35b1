"""How a run came out: the numbers on top of the page and the sections behind them, against the facts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from changed_run import with_outputs, with_target
from decided_run import HARM, MAIN, ROUTED, decided, routed
from rich_run import rich
from sample_run import BUDGET, SampleRun

from loka_onnx.core.correction import CorrectionSet, PlanCorrections, Variant
from loka_onnx.core.evaluation import (
    BudgetStatus,
    Choice,
    Evaluation,
    EvaluationSet,
    InputPlace,
    Latency,
    SliceDifference,
    Why,
    median_error,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.core.refinement import Refinement
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.report import ReportData
from loka_onnx.report.document import BudgetBar, TargetVerdict, Tone
from loka_onnx.report.engine_tables import fallbacks_section, latency_tables
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.sections import build_document

TIMES = Interval(1.25, 1.2, 1.3, 0.95, 10)


def stats(data: ReportData, target: int = 0) -> dict[str, tuple[str, str]]:
    verdict = build_document(data).verdicts[target]
    return {stat.label: (stat.shown.text, stat.note) for stat in verdict.stats}


def with_times(data: ReportData, plan: str, times: Interval | None) -> ReportData:
    losers = tuple(
        replace(loser, times=times if data.engine(loser.engine).plan == plan else None)
        for loser in data.choice.targets[0].losers
    )
    return with_target(data, losers=losers)


def test_of_several_engines_of_a_baseline_the_fastest_counts(sample: SampleRun) -> None:
    data = with_times(sample.report, "bf16", TIMES)
    slower = replace(data.engine("cpu-onnxruntime-cpu-bf16"), backend="another")
    loser = next(x for x in data.choice.targets[0].losers if x.times is not None)
    worse = replace(loser, engine=slower.id, times=Interval(2.0, 1.9, 2.1, 0.95, 10))
    data = replace(data, engines=(*data.engines, slower))
    data = with_target(data, losers=(worse, *data.choice.targets[0].losers))
    note = "[1.200, 1.300], measured, over cpu-onnxruntime-cpu-bf16"
    assert stats(data)["Speed over BF16"] == ("1.250×", note)
    # A gain that may be none is not good.
    for times, tone in ((TIMES, Tone.GOOD), (Interval(1.02, 0.99, 1.05, 0.95, 10), Tone.WARN)):
        verdict = first_verdict(with_times(sample.report, "bf16", times))
        assert next(s for s in verdict.stats if s.label == "Speed over BF16").shown.tone is tone


def test_without_a_time_it_says_why(sample: SampleRun) -> None:
    shown = stats(sample.report)
    assert shown["Speed over BF16"] == ("not measured", "cpu-onnxruntime-cpu-bf16: declined")
    assert "Speed over FP32" not in shown, "the engine of that plan itself"
    losers = sample.report.choice.targets[0].losers
    unmeasured = tuple(replace(loser, why=Why.NOT_MEASURED) for loser in losers)
    note = stats(with_target(sample.report, losers=unmeasured))["Speed over BF16"][1]
    assert note == "cpu-onnxruntime-cpu-bf16"
    # Whatever was timed, a simulated engine has no speed.
    simulated = next(e for e in sample.report.engines if e.simulated)
    data = with_target(with_times(sample.report, "bf16", TIMES), engine=simulated.id, plan=simulated.plan)
    assert [stats(data)[name][0] for name in ("Speed over BF16", "Latency p50")] == ["simulated"] * 2


def test_accuracy_is_that_of_certification_or_of_an_engine_of_the_same_plan(sample: SampleRun) -> None:
    assert "1,600 certification rows" in stats(sample.report)["ΔNE"][1]
    assert [bar.label for bar in first_verdict(sample.report).bars] == ["ctr on certification"]
    note = stats(sample.report, target=1)["ΔNE"][1]
    assert note.endswith("simulated by cpu-onnxruntime-cpu-fp8-safe, this engine was not run")
    nothing = replace(sample.report, evaluations=EvaluationSet(()))
    assert stats(nothing, target=1)["Accuracy"] == ("not measured", "")


def test_an_engine_that_is_the_reference_is_never_the_worst(sample: SampleRun) -> None:
    data = with_outputs(sample.report, lambda o: replace(o, difference=None))
    assert stats(data)["Accuracy"] == ("reference", "every engine is compared with it")


@pytest.mark.parametrize("status", [BudgetStatus.WITHIN, BudgetStatus.UNDECIDED])
@pytest.mark.parametrize("remarks", [(), ("few rows",)])
def test_a_budget_is_told_where_it_is_undecided_or_has_a_remark(sample, status, remarks) -> None:
    changed = partial(replace, budget_status=status, remarks=remarks)
    document = build_document(with_outputs(sample.report, changed))
    tables = [table for section in document.sections for table in section.tables]
    (outcomes, *_) = [table for table in tables if table.columns[-1].title == "Outcome"]
    is_told = any("ctr is " in row[-1].text for row in outcomes.rows)
    assert is_told is (status is BudgetStatus.UNDECIDED or bool(remarks))


def test_every_number_of_the_page_is_in_markdown(sample: SampleRun) -> None:
    data = with_times(sample.report, "bf16", TIMES)
    document = build_document(data)
    markdown = " ".join(to_markdown(document).replace("\\", "").split())
    for verdict in document.verdicts:
        for stat in verdict.stats:
            if stat.label.startswith("Speed"):
                assert f"{stat.label}: {stat.shown.text} ({stat.note})" in markdown
            assert stat.shown.text in markdown
        for bar in verdict.bars:
            assert bar.text in markdown


def bar(lower: float, value: float, upper: float, budget: float = BUDGET) -> BudgetBar:
    return BudgetBar("ctr", "", "within", Interval(value, lower, upper, 0.95, 10), budget, "")


@pytest.mark.parametrize(
    "made",
    [bar(-1e-4, 1e-5, 1e-4), bar(1e-5, 2e-5, 3e-5), bar(3e-4, 4e-4, 5e-3), bar(-3e-4, -2e-4, -1e-4)],
    ids=["around 0", "inside", "beyond", "better"],
)
def test_a_bar_keeps_the_order_of_what_is_on_it(made: BudgetBar) -> None:
    values = {name: getattr(made.interval, name) for name in ("lower", "value", "upper")}
    values |= {"zero": 0.0, "limit": made.budget}
    places = made.places
    assert sorted(values, key=values.get) == sorted(places, key=places.get)
    assert all(0 < place < 100 for place in places.values())


def first_verdict(data: ReportData) -> TargetVerdict:
    return build_document(data).verdicts[0]


def test_an_fp8_engine_for_some_sizes_is_an_fp8_engine_that_is_emitted(sample: SampleRun) -> None:
    data = routed(sample.report)
    verdict = first_verdict(data)
    assert verdict.headline.startswith("gpu: bf16 and fp8-safe, 2.10× over FP32 (")
    assert not any("No FP8 engine" in fact for fact in verdict.facts)
    assert verdict.tone is Tone.GOOD
    costs = [fact.partition(" (")[0] for fact in verdict.facts if fact.startswith("Cost")]
    assert costs == [f"Cost of {MAIN}", f"Cost of {ROUTED}", f"Cost of {ROUTED}"]
    shown = stats(data)
    assert shown["Plans"][0] == "bf16, fp8-safe"
    assert shown["Plans"][1].startswith("bf16: no FP8; fp8-safe: sites in FP8: 1, ")
    # A figure says whose it is where there are several engines.
    assert shown["Latency p50"] == ("117.0 µs", f"batch 1,024, on H100, by {ROUTED}")
    assert stats(decided(sample.report))["Latency p50"] == ("117.0 µs", "batch 1,024, on H100")
    gain = f"[2.050, 2.161], measured, of {MAIN}, over gpu-onnxruntime-sm90-fp32"
    assert shown["Speed over FP32"][1] == gain
    assert "Speed over BF16" not in shown, "the main engine is of that plan itself"
    harmed = SliceDifference("country", "BR", 100, 100, HARM, HARM, HARM, "beyond")
    verdict = first_verdict(
        with_outputs(data, lambda o: replace(o, slices=(harmed,)), "certification", ROUTED)
    )
    assert verdict.tone is Tone.WARN
    (fact,) = (fact for fact in verdict.facts if fact.startswith("Slices"))
    assert fact.startswith(f"Slices of {ROUTED} (ctr, certification): 1 of 1 judged beyond the budget")
    facts = first_verdict(routed(sample.report, "fp32")).facts
    assert facts[0] == "No FP8 engine is emitted for this target: it gets high precision (bf16, fp32)."


def test_of_several_engines_the_worst_against_its_budget_is_on_top(sample: SampleRun) -> None:
    data = routed(sample.report, "fp8-all")
    shown, note = stats(data)["ΔNE"]
    assert shown == "+0.0900 %" and note.endswith("2,400 selection rows, of gpu-onnxruntime-sm90-fp8-all")
    verdict = first_verdict(data)
    assert verdict.tone is Tone.WARN
    assert [bar.label for bar in verdict.bars] == [
        f"ctr on selection of {MAIN}",
        "ctr on selection of gpu-onnxruntime-sm90-fp8-all",
    ]


FP32, SAFE, ALL = (f"cpu-onnxruntime-cpu-{plan}" for plan in ("fp32", "fp8-safe", "fp8-all"))
SHOWN_TIMES = "1.254× [1.201, 1.310]"


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
        f"| 9 to 64 | {SAFE} | fp8-safe | {SHOWN_TIMES} |",
        f"| 65 and more | {ALL} | fp8-all | 1.010× |",
        f"By batch size: to 8 rows {FP32}; to 64 rows {SAFE}; to 512 rows {ALL}.",
        f"| {SAFE} | simulated | {SHOWN_TIMES} | 1.70× |",
        "Median error of 2 latencies predicted: 7.18 %.",
        f"No latency is predicted of '{ALL}': FP8 at 'fc' breaks it up.",
        f"{ALL} at batch 512: the worker died",
        f"cpu at batch 512: the chosen engine answers 1.51× the requests of {SAFE}",
        f"| {FP32} | 512 | chosen | on the host | 2 | 1000.0 µs | 3,012.3 | 1,542,318 | 400.1 µs | 900.5 µs "
        "| 0.81 % | 3,718.7 | 150.2 µs |",
        f"| {ALL} | 512 | best without FP8 | on the host | 2 | 1000.0 µs | not measured | – |",
        "Predicted against measured latency of every plan tried: median error 10.4 %, 4 times.",
        "gpu, trt hopper: 1 rounds in 90.1 s, ended because done; 'refined' is the fastest inside the budget",
        f"| **1** | refined | whole, 3 given back | 51.2 % | {SHOWN_TIMES} | 1.41× | yes | 40.1 s |",
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
    # The load stands beside latencies of a busy host.
    ((first, second),) = timed(data, replace(FIRST, host_load=1.0), replace(FIRST, batch=64, host_load=3.21))
    assert (len(first), first[-2], second[-2]) == (len(host[0]) + 1, "1.0", "3.2")


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
