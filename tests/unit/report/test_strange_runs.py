"""Runs that went wrong somewhere still have a report, and its numbers are those of report.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decided_run import decided
from page_numbers import NUMBER, check_numbers, tables_of
from sample_run import SampleRun

from loka_onnx.core.evaluation import Choice, EvaluationSet
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.report import ReportData, render
from loka_onnx.report.chart import charts
from loka_onnx.report.histograms import histogram_data
from loka_onnx.report.sections import build_document
from loka_onnx.report.site_tables import shown_plan

Change = Callable[[ReportData], ReportData]


def no_sites(data: ReportData) -> ReportData:
    model = replace(data.modified, sites=())
    plans = tuple(replace(plan, decisions=()) for plan in data.plans.plans)
    profile = replace(data.profile, sites=())
    return replace(data, exported=model, modified=model, profile=profile, plans=PlanSet(plans))


def no_engines(data: ReportData) -> ReportData:
    return replace(data, engines=(), evaluations=EvaluationSet(()), choice=Choice(()))


def ranges(**changes: Any) -> Change:
    def changed(data: ReportData) -> ReportData:
        sites = tuple(
            replace(entry, operands={n: replace(stats, **changes) for n, stats in entry.operands.items()})
            for entry in data.profile.sites
        )
        return replace(data, profile=replace(data.profile, sites=sites))

    return changed


def scales(value: float) -> Change:
    def changed(data: ReportData) -> ReportData:
        found = {name: dict.fromkeys(by_tensor, value) for name, by_tensor in data.profile.scales.items()}
        return replace(data, profile=replace(data.profile, scales=found))

    return changed


def outputs(change: Callable[[Any], Any]) -> Change:
    def changed(data: ReportData) -> ReportData:
        found = (
            replace(evaluation, outputs=tuple(map(change, evaluation.outputs)))
            for evaluation in data.evaluations.evaluations
        )
        return replace(data, evaluations=EvaluationSet(tuple(found)))

    return changed


def judged(value: float, lower: float, upper: float) -> Change:
    def change(output: Any) -> Any:
        if output.difference is None:
            return output
        found = Interval(value, lower, upper, 0.95, 100)
        return replace(output, difference=replace(output.difference, delta_ne=found))

    return outputs(change)


def latencies(value: float) -> Change:
    def changed(data: ReportData) -> ReportData:
        found = (
            replace(one, latencies=tuple(replace(latency, p50_us=value) for latency in one.latencies))
            for one in data.evaluations.evaluations
        )
        return replace(data, evaluations=EvaluationSet(tuple(found)))

    return changed


STRANGE: dict[str, Change] = {
    "no sites": no_sites,
    "no plans": lambda data: replace(data, plans=PlanSet(())),
    "no engines": no_engines,
    "no evaluations": lambda data: replace(data, evaluations=EvaluationSet(())),
    "no choice": lambda data: replace(data, choice=Choice(())),
    "one candidate": lambda data: replace(data, engines=data.engines[:1]),
    "no profile": lambda data: replace(data, profile=replace(data.profile, sites=(), scales={})),
    "infinite amax": ranges(amax=math.inf),
    "no amax": ranges(amax=math.nan),
    "empty histograms": ranges(histogram=MagnitudeHistogram(0, 0, ())),
    "zeros only": ranges(histogram=MagnitudeHistogram(9, 0, ()), amax=0.0),
    "scale 0": scales(0.0),
    "infinite scale": scales(math.inf),
    "no scale": scales(math.nan),
    "unbounded interval": judged(1e-5, -math.inf, math.inf),
    "no interval": judged(math.nan, math.nan, math.nan),
    "no change at all": judged(0.0, 0.0, 0.0),
    "budget 0": outputs(lambda output: replace(output, budget=0.0)),
    "infinite budget": outputs(lambda output: replace(output, budget=math.inf)),
    "no latency": latencies(math.nan),
    "infinite latency": latencies(math.inf),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_run_has_a_report_with_its_numbers(sample: SampleRun, tmp_path: Path, name: str) -> None:
    facts_file, markdown, page = render(STRANGE[name](decided(sample.report)), tmp_path)
    facts = json.loads(facts_file.read_text(encoding="utf-8"))
    checked = 0
    for cell in tables_of(page.read_text(encoding="utf-8")).cells:
        text = " ".join(cell.text.split())
        if cell.numeric and NUMBER.search(text):
            checked += check_numbers(
                facts, text, cell.attributes["data-source"], cell.attributes["data-value"]
            )
    assert checked > 50
    assert markdown.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(("value", "is_drawn"), [(6.0 / 448, True), (math.inf, False), (math.nan, False)])
def test_no_range_is_drawn_for_a_scale_that_rounds_nothing(
    sample: SampleRun, tmp_path: Path, value: float, is_drawn: bool
) -> None:
    data = scales(value)(decided(sample.report))
    bounds = histogram_data(data, shown_plan(data))["sites"][0]["activations"][0]["bounds"]
    assert (bounds is not None) == is_drawn


def test_an_infinite_budget_has_no_line_and_no_bar(sample: SampleRun) -> None:
    finite = decided(sample.report)
    infinite = STRANGE["infinite budget"](finite)
    for data, is_drawn in ((finite, True), (infinite, False)):
        drawn = [chart.figure for chart in charts(data) if chart.figure is not None]
        assert drawn
        assert all(bool(figure["layout"]["shapes"]) == is_drawn for figure in drawn)
        assert bool(build_document(data).verdicts[0].bars) == is_drawn


def test_an_engine_without_a_finite_latency_is_named_beside_the_chart(sample: SampleRun) -> None:
    (chart, *_) = charts(latencies(math.nan)(decided(sample.report)))
    assert chart.figure is None
    assert len(chart.left_out) == 4
