"""Runs that went wrong somewhere still have a report, and its numbers are those of report.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from changed_run import with_differences, with_latencies, with_outputs, with_profile, with_ranges
from decided_run import decided
from page_numbers import NUMBER, check_numbers, tables_of
from sample_run import SampleRun

from loka_onnx.core.evaluation import Choice, EvaluationSet
from loka_onnx.core.formats import INT8
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.report import ReportData, render
from loka_onnx.report.chart import charts
from loka_onnx.report.histograms import activations, histogram_data
from loka_onnx.report.sections import build_document
from loka_onnx.report.site_tables import shown_plan

Change = Callable[[ReportData], ReportData]


def no_sites(data: ReportData) -> ReportData:
    model = replace(data.modified, sites=())
    plans = tuple(replace(plan, decisions=()) for plan in data.plans.plans)
    return with_profile(replace(data, exported=model, modified=model, plans=PlanSet(plans)), sites=())


def no_engines(data: ReportData) -> ReportData:
    return replace(data, engines=(), evaluations=EvaluationSet(()), choice=Choice(()))


def scales(value: float) -> Change:
    def changed(data: ReportData) -> ReportData:
        found = {name: dict.fromkeys(by_tensor, value) for name, by_tensor in data.profile.scales.items()}
        return with_profile(data, scales=found)

    return changed


def judged(value: float, lower: float, upper: float) -> Change:
    return partial(with_differences, delta_ne=Interval(value, lower, upper, 0.95, 100))


def budget(value: float) -> Change:
    return lambda data: with_outputs(data, lambda output: replace(output, budget=value))


def latencies(value: float) -> Change:
    return lambda data: with_latencies(data, lambda latency: replace(latency, p50_us=value))


STRANGE: dict[str, Change] = {
    "no sites": no_sites,
    "no plans": lambda data: replace(data, plans=PlanSet(())),
    "no engines": no_engines,
    "no evaluations": lambda data: replace(data, evaluations=EvaluationSet(())),
    "no choice": lambda data: replace(data, choice=Choice(())),
    "one candidate": lambda data: replace(data, engines=data.engines[:1]),
    "no profile": partial(with_profile, sites=(), scales={}),
    "infinite amax": partial(with_ranges, amax=math.inf),
    "no amax": partial(with_ranges, amax=math.nan),
    "empty histograms": partial(with_ranges, histogram=MagnitudeHistogram(0, 0, ())),
    "zeros only": partial(with_ranges, histogram=MagnitudeHistogram(9, 0, ()), amax=0.0),
    "scale 0": scales(0.0),
    "infinite scale": scales(math.inf),
    "no scale": scales(math.nan),
    "unbounded interval": judged(1e-5, -math.inf, math.inf),
    "no interval": judged(math.nan, math.nan, math.nan),
    "no change at all": judged(0.0, 0.0, 0.0),
    "budget 0": budget(0.0),
    "infinite budget": budget(math.inf),
    "no latency": latencies(math.nan),
    "infinite latency": latencies(math.inf),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_a_strange_run_has_a_report_with_its_numbers(
    sample: SampleRun, tmp_path: Path, change: Change
) -> None:
    facts_file, markdown, page = render(change(decided(sample.report)), tmp_path)
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


def test_integers_have_no_subnormal_range(sample: SampleRun) -> None:
    data = scales(6.0 / 448)(decided(sample.report))
    drawn = next(item for item in activations(data, shown_plan(data)) if item.bounds is not None)
    assert replace(drawn, recipe=Recipe.of(INT8)).bounds is None


@pytest.mark.parametrize(("value", "is_drawn"), [(6.0 / 448, True), (math.inf, False), (math.nan, False)])
def test_no_range_is_drawn_for_a_scale_that_rounds_nothing(
    sample: SampleRun, value: float, is_drawn: bool
) -> None:
    data = scales(value)(decided(sample.report))
    bounds = histogram_data(data, shown_plan(data))["sites"][0]["activations"][0]["bounds"]
    assert (bounds is not None) == is_drawn


def test_an_infinite_budget_has_no_line_and_no_bar(sample: SampleRun) -> None:
    finite = decided(sample.report)
    for data, is_drawn in ((finite, True), (budget(math.inf)(finite), False)):
        drawn = [chart.figure for chart in charts(data) if chart.figure is not None]
        assert drawn
        assert all(bool(figure["layout"]["shapes"]) == is_drawn for figure in drawn)
        assert bool(build_document(data).verdicts[0].bars) == is_drawn


def test_an_engine_without_a_finite_latency_is_named_beside_the_chart(sample: SampleRun) -> None:
    (chart, *_) = charts(latencies(math.nan)(decided(sample.report)))
    assert chart.figure is None
    assert len(chart.left_out) == 4
