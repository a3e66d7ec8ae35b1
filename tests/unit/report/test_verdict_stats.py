"""The numbers on top of the page, against the facts that they are from."""

from __future__ import annotations

import dataclasses

import pytest
from changed_run import with_outputs, with_target
from decided_run import HARM, MAIN, ROUTED, decided, routed
from sample_run import BUDGET, SampleRun

from loka_onnx.core.evaluation import EvaluationSet, SliceDifference, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.report import ReportData
from loka_onnx.report.document import BudgetBar, Tone, Verdict
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.sections import build_document

TIMES = Interval(1.25, 1.2, 1.3, 0.95, 10)


def stats(data: ReportData, target: int = 0) -> dict[str, tuple[str, str]]:
    verdict = build_document(data).verdicts[target]
    return {stat.label: (stat.shown.text, stat.note) for stat in verdict.stats}


def with_times(data: ReportData, plan: str, times: Interval | None) -> ReportData:
    losers = tuple(
        dataclasses.replace(loser, times=times if data.engine(loser.engine).plan == plan else None)
        for loser in data.choice.targets[0].losers
    )
    return with_target(data, losers=losers)


def test_of_several_engines_of_a_baseline_the_fastest_counts(sample: SampleRun) -> None:
    data = with_times(sample.report, "bf16", TIMES)
    slower = dataclasses.replace(data.engine("cpu-onnxruntime-cpu-bf16"), backend="another")
    loser = next(x for x in data.choice.targets[0].losers if x.times is not None)
    worse = dataclasses.replace(loser, engine=slower.id, times=Interval(2.0, 1.9, 2.1, 0.95, 10))
    data = dataclasses.replace(data, engines=(*data.engines, slower))
    data = with_target(data, losers=(worse, *data.choice.targets[0].losers))
    note = "[1.200, 1.300], measured, over cpu-onnxruntime-cpu-bf16"
    assert stats(data)["Speed over BF16"] == ("1.250×", note)


def test_without_a_time_it_says_why(sample: SampleRun) -> None:
    shown = stats(sample.report)
    assert shown["Speed over BF16"] == ("not measured", "cpu-onnxruntime-cpu-bf16: declined")
    assert "Speed over FP32" not in shown, "the engine of that plan itself"
    losers = sample.report.choice.targets[0].losers
    unmeasured = tuple(dataclasses.replace(loser, why=Why.NOT_MEASURED) for loser in losers)
    note = stats(with_target(sample.report, losers=unmeasured))["Speed over BF16"][1]
    assert note == "cpu-onnxruntime-cpu-bf16"


def test_a_simulated_engine_has_no_speed_whatever_was_timed(sample: SampleRun) -> None:
    simulated = next(e for e in sample.report.engines if e.simulated)
    data = with_target(with_times(sample.report, "bf16", TIMES), engine=simulated.id, plan=simulated.plan)
    shown = stats(data)
    assert shown["Speed over BF16"][0] == "simulated"
    assert shown["Latency p50"][0] == "simulated"


def test_a_gain_that_may_be_none_is_not_good(sample: SampleRun) -> None:
    for times, tone in ((TIMES, Tone.GOOD), (Interval(1.02, 0.99, 1.05, 0.95, 10), Tone.WARN)):
        (verdict, *_) = build_document(with_times(sample.report, "bf16", times)).verdicts
        assert next(s for s in verdict.stats if s.label == "Speed over BF16").shown.tone is tone


def test_the_accuracy_of_an_engine_that_was_not_run_is_that_of_its_plan_and_says_so(sample) -> None:
    note = stats(sample.report, target=1)["ΔNE"][1]
    assert note.endswith("simulated by cpu-onnxruntime-cpu-fp8-safe, this engine was not run")
    nothing = dataclasses.replace(sample.report, evaluations=EvaluationSet(()))
    assert stats(nothing, target=1)["Accuracy"] == ("not measured", "")


def test_certification_decides_where_it_was_evaluated(sample: SampleRun) -> None:
    (verdict, *_) = build_document(sample.report).verdicts
    assert "1,600 certification rows" in stats(sample.report)["ΔNE"][1]
    assert [bar.label for bar in verdict.bars] == ["ctr on certification"]


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


def first_verdict(data: ReportData) -> Verdict:
    return build_document(data).verdicts[0]


def test_an_fp8_engine_for_some_sizes_is_an_fp8_engine_that_is_emitted(sample: SampleRun) -> None:
    verdict = first_verdict(routed(sample.report))
    assert verdict.headline.startswith("gpu: bf16 and fp8-safe, 2.10× over FP32 (")
    assert not any("No FP8 engine" in fact for fact in verdict.facts)
    assert verdict.tone is Tone.GOOD
    costs = [fact.partition(" (")[0] for fact in verdict.facts if fact.startswith("Cost")]
    assert costs == [f"Cost of {MAIN}", f"Cost of {ROUTED}", f"Cost of {ROUTED}"]
    plans, note = stats(routed(sample.report))["Plans"]
    assert plans == "bf16, fp8-safe"
    assert note.startswith("bf16: no FP8; fp8-safe: sites in FP8: 1, ")


def test_several_engines_without_fp8_are_high_precision(sample: SampleRun) -> None:
    facts = first_verdict(routed(sample.report, "fp32")).facts
    assert facts[0] == "No FP8 engine is emitted for this target: it gets high precision (bf16, fp32)."


def test_the_latency_is_that_of_the_engine_that_takes_the_size(sample: SampleRun) -> None:
    data = routed(sample.report)
    assert stats(data)["Latency p50"] == ("117.0 µs", f"batch 1,024, on H100, by {ROUTED}")
    assert stats(decided(sample.report))["Latency p50"] == ("117.0 µs", "batch 1,024, on H100")


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


def test_a_slice_that_an_engine_of_some_sizes_harms_is_told(sample: SampleRun) -> None:
    data = routed(sample.report)
    harmed = SliceDifference("country", "BR", 100, 100, HARM, HARM, HARM, "beyond")
    sliced = with_outputs(data, lambda o: dataclasses.replace(o, slices=(harmed,)), "certification", ROUTED)
    verdict = first_verdict(sliced)
    assert verdict.tone is Tone.WARN
    (fact,) = (fact for fact in verdict.facts if fact.startswith("Slices"))
    assert fact.startswith(
        f"Slices of {ROUTED} (ctr, certification): 1 of 1 judged beyond the budget of 0.02 %; "
        "worst country = BR"
    )


def test_a_gain_beside_routes_says_whose_it_is(sample: SampleRun) -> None:
    data = routed(sample.report)
    note = stats(data)["Speed over FP32"][1]
    assert note == f"[2.050, 2.161], measured, of {MAIN}, over gpu-onnxruntime-sm90-fp32"
    assert "Speed over BF16" not in stats(data), "the main engine is of that plan itself"
