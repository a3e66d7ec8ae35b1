"""What of two runs is held against what, and when their comparison may be green."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from page_numbers import check_numbers
from rich_run import rich
from sample_run import SampleRun
from two_runs import compared, costing, emitting, slower

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice, EvaluationSet, Rejection, Route, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Verdict
from loka_onnx.operations.compare.run_document import Change, RunComparison
from loka_onnx.operations.compare.run_text import comparison_document
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.document import Table, Tone
from loka_onnx.report.document import Verdict as Said
from loka_onnx.report.figures import Told

FP32, SAFE = "cpu-onnxruntime-cpu-fp32", "cpu-onnxruntime-cpu-fp8-safe"
COST = Interval(0.0002, 0.0001, 0.0003, 0.95, 2400)
HIGHER = Interval(0.0005, 0.0004, 0.0006, 0.95, 2400)


@pytest.fixture(scope="module")
def run(sample: SampleRun) -> ReportData:
    """FP32 takes every request to the CPU, inside the budget on both splits."""
    return costing(emitting(rich(sample.report), FP32, "fp32"), COST, budget_status="within")


def said(found: RunComparison, target: str = "cpu") -> Said:
    (verdict,) = [v for v in comparison_document(found).verdicts if v.target == target]
    return verdict


def table(found: RunComparison, caption: str) -> Table:
    document = comparison_document(found)
    (only,) = [t for s in document.sections for t in s.tables if t.caption == caption]
    return only


def column(shown: Table, title: str) -> list[str]:
    place = [c.title for c in shown.columns].index(title)
    return [row[place].text for row in shown.rows]


def paragraphs(found: RunComparison, anchor: str) -> list[str]:
    document = comparison_document(found)
    return [p for s in document.sections if s.anchor == anchor for p in s.paragraphs]


# Several architectures of one target -----------------------------------------------------------------


def on_two(data: ReportData, *plans: str) -> ReportData:
    """Engines for two architectures of the RTX; the plans are those emitted for sm89 and for sm120."""
    old = next(e for e in data.engines if e.target == "rtx")
    architectures = ("sm89", "sm120")
    engines = [
        dataclasses.replace(old, architecture=architecture, plan=plan)
        for architecture in architectures
        for plan in dict.fromkeys((*plans, "fp32", "fp8-safe"))
    ]
    cpu, rtx = data.choice.targets
    choices = []
    for architecture, plan in zip(architectures, plans, strict=True):
        mine = [e for e in engines if e.architecture == architecture]
        (emitted,) = [e for e in mine if e.plan == plan]
        losers = tuple(Rejection(e.id, Why.NOT_RUN, "not run") for e in mine if e is not emitted)
        choices.append(dataclasses.replace(rtx, engine=emitted.id, plan=plan, losers=losers))
    others = tuple(e for e in data.engines if e.target != "rtx")
    return dataclasses.replace(data, engines=(*others, *engines), choice=Choice((cpu, *choices)))


def test_each_architecture_of_a_target_is_compared(tmp_path: Path, run: ReportData) -> None:
    before = on_two(run, "fp8-safe", "fp8-safe")
    found = compared(tmp_path / "a", before, on_two(run, "fp8-safe", "fp32"))
    assert [(t.hardware, t.change) for t in found.targets] == [
        ("cpu", Change.SAME),
        ("rtx (sm89)", Change.SAME),
        ("rtx (sm120)", Change.CHANGED),
    ]
    assert said(found, "rtx (sm120)").headline == (
        "rtx (sm120): rtx-tensorrt_rtx-sm120-fp32 (plan fp32) in place of "
        "rtx-tensorrt_rtx-sm120-fp8-safe (plan fp8-safe)"
    )
    emitted = table(found, "What is emitted for each target")
    assert [name for name in column(emitted, "Name") if ": " not in name] == [
        "cpu", "rtx (sm89)", "rtx (sm120)"
    ]  # fmt: skip
    assert "emitted for rtx (sm120)" in {change.where for change in found.sites}

    # By architecture and not by their order; a target that was one piece of hardware is one of the two.
    cpu, sm89, sm120 = before.choice.targets
    turned = dataclasses.replace(before, choice=Choice((cpu, sm120, sm89)))
    assert {t.change for t in compared(tmp_path / "b", before, turned).targets} == {Change.SAME}
    grown = compared(tmp_path / "c", dataclasses.replace(before, choice=Choice((cpu, sm120))), before)
    assert [(t.hardware, t.change) for t in grown.targets] == [
        ("cpu", Change.SAME),
        ("rtx (sm120)", Change.SAME),
        ("rtx (sm89)", Change.APPEARED),
    ]


# Several engines by the size of requests -----------------------------------------------------------------


def routed(data: ReportData, *routes: tuple[int, str, str]) -> ReportData:
    first, *rest = data.choice.targets
    chosen = dataclasses.replace(first, routes=tuple(Route(*route) for route in routes))
    return dataclasses.replace(data, choice=dataclasses.replace(data.choice, targets=(chosen, *rest)))


def test_requests_that_go_to_another_engine_are_a_change(tmp_path: Path, run: ReportData) -> None:
    now = routed(run, (8, FP32, "fp32"), (1024, SAFE, "fp8-safe"))
    found = compared(tmp_path, run, now)
    cpu, _ = found.targets
    assert cpu.change is Change.CHANGED
    verdict = said(found)
    assert (
        verdict.headline == f"cpu: both emit {FP32} (plan fp32), and requests go to engines by another rule"
    )
    assert verdict.tone is Tone.WARN
    assert f"New: requests by their size: up to 8 rows: {FP32}; more: {SAFE}." in verdict.facts
    emitted = table(found, "What is emitted for each target")
    assert [remark for remark in column(emitted, "Remark") if remark] == [
        f"requests by their size, then: all: {FP32}; now: up to 8 rows: {FP32}; more: {SAFE}"
    ]
    # Both engines of the new run are judged, and each time is of the engine that takes such requests.
    shown = table(found, "What the emitted engines cost")
    assert set(column(shown, "Target, output, split")) == {
        "cpu · ctr · selection",
        "cpu · ctr · certification",
        f"cpu · ctr · selection · {FP32} then, {SAFE} now",
        f"cpu · ctr · certification · {FP32} then",
    }
    assert FP32 in column(shown, "Remark")
    assert any(fact.startswith(f"Cost (ctr, selection, {FP32} then, {SAFE} now): ") for fact in verdict.facts)
    latencies = table(found, "Latency of the emitted engines")
    assert [name.split(" · ")[1] for name in column(latencies, "Target, batch, inputs")] == [
        "batch 8", "batch 1,024", "batch 1,024"
    ]  # fmt: skip
    # The times of the other engine are those of a simulation.
    engines = [remark.partition("; ")[0] for remark in column(latencies, "Remark")]
    assert engines == [FP32, f"{FP32} then", f"{FP32} then"]
    assert column(latencies, "New p50, p99")[1:] == [numbers.NOT_MEASURED] * 2
    assert "emitted for cpu, fp32 → fp8-safe" in {change.where for change in found.sites}
    facts = json.loads(serde.dumps(found))
    for text in verdict.facts:
        if isinstance(text, Told) and "requests by their size" in text:
            assert check_numbers(facts, text, text.source, None) == 1


SMALL = [(8, FP32, "fp32"), (64, SAFE, "fp8-safe")]


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (SMALL, "the same"),
        # Sizes are other ones, and each request goes where it went.
        ([(4, FP32, "fp32"), (8, FP32, "fp32"), (512, SAFE, "fp8-safe")], "the same"),
        ([(16, FP32, "fp32"), (64, SAFE, "fp8-safe")], "changed"),
        ([], "changed"),
    ],
)
def test_a_route_table_is_what_it_does_to_requests(
    tmp_path: Path, run: ReportData, now: Any, change: str
) -> None:
    cpu, _ = compared(tmp_path, routed(run, *SMALL), routed(run, *now)).targets
    assert cpu.change == change


def test_the_cost_of_an_engine_that_takes_some_requests_only_counts(tmp_path: Path, run: ReportData) -> None:
    before = routed(run, *SMALL)
    evaluations = tuple(
        e if e.engine != SAFE else with_status(e, "beyond") for e in before.evaluations.evaluations
    )
    after = dataclasses.replace(before, evaluations=EvaluationSet(evaluations))
    assert said(compared(tmp_path, before, after)).tone is Tone.BAD


def with_status(evaluation: Any, status: str) -> Any:
    outputs = tuple(dataclasses.replace(o, budget_status=status) for o in evaluation.outputs)
    return dataclasses.replace(evaluation, outputs=outputs)


# When it may be green ------------------------------------------------------------------------------


def in_parts(data: ReportData, spread: float) -> ReportData:
    """Latencies whose ten parts spread by a fraction of the median."""
    shifts = [spread * (place - 4.5) / 4.5 for place in range(10)]
    evaluations = tuple(
        dataclasses.replace(
            e,
            latencies=tuple(
                dataclasses.replace(item, loads_us=tuple(item.p50_us * (1 + shift) for shift in shifts))
                for item in e.latencies
            ),
        )
        for e in data.evaluations.evaluations
    )
    return dataclasses.replace(data, evaluations=EvaluationSet(evaluations))


@pytest.mark.parametrize(
    ("factor", "spread", "tone", "slower_"),
    [
        (3.0, 0.02, Tone.WARN, "yes"),
        (1.05, 0.001, Tone.WARN, "yes"),
        (1.05, 0.1, Tone.GOOD, "no"),
        (1.005, 0.0001, Tone.GOOD, "no"),
        (0.5, 0.02, Tone.GOOD, "no"),
    ],
)
def test_an_engine_that_takes_longer_than_noise_is_not_green(
    tmp_path: Path, run: ReportData, factor: float, spread: float, tone: Tone, slower_: str
) -> None:
    before = in_parts(run, spread)
    found = compared(tmp_path, before, slower(before, factor))
    assert said(found).tone is tone
    ratios = column(table(found, "Latency of the emitted engines"), "New over old")
    assert {text.partition("; ")[2] for text in ratios} == {"slower" if slower_ == "yes" else "not slower"}
    is_told = any("slower by more than either measurement wandered" in fact for fact in said(found).facts)
    assert is_told is (slower_ == "yes")


def test_without_a_recorded_spread_a_percent_is_noise(tmp_path: Path, run: ReportData) -> None:
    assert said(compared(tmp_path / "a", run, slower(run, 1.02))).tone is Tone.WARN
    assert said(compared(tmp_path / "b", run, slower(run, 1.009))).tone is Tone.GOOD


def without(data: ReportData, split: str) -> ReportData:
    kept = tuple(e for e in data.evaluations.evaluations if e.split != split)
    return dataclasses.replace(data, evaluations=EvaluationSet(kept))


def on_other_rows(data: ReportData) -> ReportData:
    splits = tuple(dataclasses.replace(s, digest="e" * 64) for s in data.data.splits)
    return dataclasses.replace(data, data=dataclasses.replace(data.data, splits=splits))


def of_another_model(data: ReportData) -> ReportData:
    return dataclasses.replace(data, exported=dataclasses.replace(data.exported, digest="f" * 64))


def test_green_is_only_what_is_seen_to_hold(tmp_path: Path, run: ReportData) -> None:
    def tone(name: str, after: ReportData) -> Tone:
        return said(compared(tmp_path / name, run, after)).tone

    assert tone("same", run) is Tone.GOOD
    assert tone("lower cost", costing(run, Interval(0.0, -5e-5, 5e-5, 0.95, 2400))) is Tone.GOOD
    assert tone("undecided", costing(run, COST, budget_status="undecided")) is Tone.WARN
    assert tone("not certified", without(run, "certification")) is Tone.WARN
    assert tone("rows", on_other_rows(run)) is Tone.WARN
    assert tone("model", of_another_model(run)) is Tone.WARN
    assert tone("device", slower(run, 1.0, "another cpu")) is Tone.WARN
    assert tone("higher cost", costing(run, HIGHER)) is Tone.BAD


def test_a_cost_is_worse_for_certain_on_the_same_rows_and_model_only(tmp_path: Path, run: ReportData) -> None:
    for name, change, remark in (
        (
            "rows",
            on_other_rows,
            "measured on another file, another selection of rows or other columns of them",
        ),
        ("model", of_another_model, "relative to another FP32 model"),
    ):
        found = compared(tmp_path / name, run, change(costing(run, HIGHER)))
        judged = [c for c in found.accuracy if c.target == "cpu"]
        assert len(judged) == 2
        assert all(c.overlap is False and not c.is_same_basis and not c.is_worse for c in judged)
        assert {c.remark for c in judged} == {remark}
        verdict = said(found)
        assert verdict.tone is Tone.WARN
        assert any(f"the intervals do not overlap; {remark}." in fact for fact in verdict.facts)
    data = compared(tmp_path / "rows", run, on_other_rows(run))
    assert paragraphs(data, "data") == [
        "Not every split is the same: where it is not, the file, the selection of its rows or the columns of "
        "the model's inputs differ, and costs may be of different rows."
    ]
    assert set(column(table(data, "Splits"), "Rows")) == {"another file, selection or columns"}


# Confidence -----------------------------------------------------------------------------------------------


def test_intervals_say_how_sure_they_are_and_that_the_others_are_not_as_sure(
    tmp_path: Path, run: ReportData
) -> None:
    surer = Interval(0.0002, 0.00005, 0.00035, 0.975, 1600)
    found = compared(tmp_path, run, costing(run, surer, "certification"))
    remarks = {c.split: c.remark for c in found.accuracy if c.target == "cpu"}
    assert remarks == {"selection": "", "certification": "the intervals are of different confidence"}
    titles = [c.title for c in table(found, "What the emitted engines cost").columns]
    assert "Old cost [95 % interval]" in titles and "New cost [95 % or 97.5 % interval]" in titles
    titles = [c.title for c in table(found, "Gain over engines of the same run").columns]
    assert "Old gain [95 % interval]" in titles and "New gain [95 % interval]" in titles


def test_gains_of_different_confidence_say_so(tmp_path: Path, run: ReportData) -> None:
    first, *rest = run.choice.targets
    times = Interval(1.25, 1.2, 1.3, 0.9785, 10)
    losers = tuple(dataclasses.replace(loser, times=times) for loser in first.losers)
    choice = dataclasses.replace(run.choice, targets=(dataclasses.replace(first, losers=losers), *rest))
    found = compared(tmp_path, run, dataclasses.replace(run, choice=choice))
    shown = table(found, "Gain over engines of the same run")
    assert "New gain [97.8 % interval]" in [c.title for c in shown.columns]
    assert column(shown, "Remark") == ["the intervals are of different confidence"]


# Sites ----------------------------------------------------------------------------------------------------

ALIKE = (
    "Both models have the same sites, of the same kinds and sizes, and every plan that both runs have treats "
    "them alike."
)


def test_sites_are_alike_only_where_nothing_of_them_differs(tmp_path: Path, run: ReportData) -> None:
    assert ALIKE in paragraphs(compared(tmp_path / "same", run, run), "site-changes")

    # A plan without FP8 in either run.
    plan = run.plan("fp32")
    assert plan is not None and not plan.fp8_sites
    first = dataclasses.replace(plan.decisions[0], verdict=Verdict.UNSAFE)
    changed = dataclasses.replace(plan, decisions=(first, *plan.decisions[1:]))
    plans = tuple(changed if p is plan else p for p in run.plans.plans)
    after = dataclasses.replace(run, plans=dataclasses.replace(run.plans, plans=plans))
    found = compared(tmp_path / "plan", run, after)
    assert [(c.where, c.site) for c in found.sites] == [("plan fp32", first.site)]
    assert ALIKE not in paragraphs(found, "site-changes")

    # A plan that says nothing of a site any more.
    silent = dataclasses.replace(plan, decisions=plan.decisions[1:])
    plans = tuple(silent if p is plan else p for p in run.plans.plans)
    after = dataclasses.replace(run, plans=dataclasses.replace(run.plans, plans=plans))
    found = compared(tmp_path / "silent", run, after)
    assert column(table(found, "Sites with another precision or verdict"), "New") == ["not decided"]

    # Another width under the same name.
    wider = dataclasses.replace(run.modified.sites[0], n=2 * run.modified.sites[0].n)
    sites = (wider, *run.modified.sites[1:])
    after = dataclasses.replace(run, modified=dataclasses.replace(run.modified, sites=sites))
    found = compared(tmp_path / "wider", run, after)
    assert not found.sites and not found.presence
    shown = table(found, "Sites of another kind or size")
    assert column(shown, "Name") == [wider.name]
    (before,), (after,) = column(shown, "Old"), column(shown, "New")
    assert before.endswith(f", N {wider.n // 2}") and after.endswith(f", N {wider.n}")
    assert ALIKE not in paragraphs(found, "site-changes")
