"""Unusual runs in the report: slices, outputs without labels, and runs that went wrong somewhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from changed_run import (
    comparable,
    with_differences,
    with_latencies,
    with_outputs,
    with_profile,
    with_ranges,
    with_target,
)
from decided_run import decided
from page_numbers import NUMBER, check_numbers, tables_of
from sample_run import BUDGET
from test_report import NASTY, printed, rendered, words_of

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice, EvaluationSet, SliceDifference, TaskMetrics
from loka_onnx.core.formats import INT8
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import ENTROPY
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.report import HTML_NAME, JSON_NAME, MARKDOWN_NAME, ReportData, numbers, render
from loka_onnx.report.chart import charts
from loka_onnx.report.document import Tone
from loka_onnx.report.histograms import activations, histogram_data
from loka_onnx.report.sections import build_document
from loka_onnx.report.site_tables import shown_plan
from loka_onnx.report.verdict import verdicts

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
def test_a_strange_run_has_a_report_with_its_numbers(sample, tmp_path, change):
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


@pytest.mark.parametrize(("value", "is_drawn"), [(6.0 / 448, True), (math.inf, False), (math.nan, False)])
def test_no_range_is_drawn_for_a_scale_that_rounds_nothing(sample, value, is_drawn):
    data = scales(value)(decided(sample.report))
    bounds = histogram_data(data, shown_plan(data))["sites"][0]["activations"][0]["bounds"]
    assert (bounds is not None) == is_drawn
    # Integers have no subnormal range.
    drawn = next(iter(activations(data, shown_plan(data))))
    assert (drawn.bounds is not None) == is_drawn
    assert replace(drawn, recipe=Recipe.of(INT8)).bounds is None


def test_an_infinite_budget_has_no_line_and_no_bar_and_a_time_that_is_no_number_no_point(sample):
    finite = decided(sample.report)
    for data, is_drawn in ((finite, True), (budget(math.inf)(finite), False)):
        drawn = [chart.figure for chart in charts(data) if chart.figure is not None]
        assert drawn
        assert all(bool(figure["layout"]["shapes"]) == is_drawn for figure in drawn)
        assert bool(build_document(data).verdicts[0].bars) == is_drawn
    (chart, *_) = charts(latencies(math.nan)(finite))
    assert chart.figure is None
    assert len(chart.left_out) == 4


NO_LABELS = "KL over the mean entropy, no labels: the labelled first-order term is not seen"


def a_slice(column, value, lower, upper, rows=1000, status="undecided"):
    interval = Interval((lower + upper) / 2, lower, upper, 0.999, rows)
    return SliceDifference(column, value, rows, rows, interval, interval, interval, status)


def unjudged(column, value, rows):
    reason = f"{rows} rows, an interval needs 100 rows"
    return SliceDifference(column, value, rows, rows, None, None, None, "not judged", reason)


SLICES = (
    a_slice("country", NASTY, 0.0003, 0.0009, status="beyond"),
    a_slice("country", None, 0.0001, 0.0012),
    a_slice("device", "", -0.0001, 0.0001, status="within"),
    *(a_slice("country", f"c{i}", -0.001 - i / 1000, 0.002) for i in range(20)),
    unjudged("country", "LI", 38),
)


@pytest.fixture(scope="module")
def sliced(sample) -> ReportData:
    return with_differences(sample.report, output={"slices": SLICES, "slices_left_out": {"country": 1234}})


def flat(markdown: str) -> str:
    text = re.sub(r"\\(.)", r"\1", " ".join(markdown.split()))
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def test_the_worst_slices_are_in_both_texts_and_all_in_the_json(sliced, tmp_path):
    files = rendered(sliced, tmp_path)
    page, scripts = words_of(files[HTML_NAME])
    markdown = flat(files[MARKDOWN_NAME])
    for text in (
        f"Worst slices of cpu-onnxruntime-cpu-fp32, ctr, on certification, budget 0.02 %; "
        f"{len(SLICES) - 10} more in report.json",
        "+0.060 % [+0.030 %, +0.090 %]",
        "(null)",
        "(empty text)",
        "Column 'country' has many values: the most frequent on selection are looked at, 1,234 are left out.",
        "Slices do not enter the choice.",
        NASTY,
    ):
        assert text in markdown
        assert text in page
    # Words: digests are made of such letters.
    assert {"c6", "c7"} & {*markdown.split()} == {"c6"}
    assert "<script>alert" not in scripts
    assert serde.loads(ReportData, files[JSON_NAME]) == sliced


def test_what_is_not_judged_is_not_dropped(sliced, tmp_path):
    few = with_outputs(sliced, lambda o: replace(o, slices=o.slices[-3:]))
    markdown = flat(rendered(few, tmp_path)[MARKDOWN_NAME])
    assert "not judged (38 rows)" in markdown
    assert "38 rows, an interval needs 100 rows" in markdown
    # Nothing harms a slice for certain: only the emitted engine is shown in detail.
    assert (
        markdown.count("Worst slices of") == markdown.count("Worst slices of cpu-onnxruntime-cpu-fp32") == 2
    )


def test_the_verdict_says_which_slice_is_beyond_the_budget(sliced):
    cpu, _ = verdicts(sliced)
    assert (
        f"Slices (ctr, certification): 1 of {len(SLICES) - 1} judged beyond the budget of 0.02 %; "
        f"worst country = {NASTY}: +0.060 % [+0.030 %, +0.090 %]; 1 within, 21 undecided, 1 not judged."
    ) in cpu.facts
    none = with_outputs(sliced, lambda o: replace(o, slices=o.slices[1:3]))
    said = "none of 2 judged beyond the budget of 0.02 %; 1 within, 1 undecided."
    assert f"Slices (ctr, certification): {said}" in verdicts(none)[0].facts
    # It takes the good colour from an FP8 engine.
    inside = with_target(sliced, engine="cpu-onnxruntime-cpu-fp8-safe", plan="fp8-safe")
    inside = with_outputs(inside, lambda o: replace(o, budget_status="within"))
    assert verdicts(inside)[0].tone is Tone.WARN
    assert verdicts(with_differences(inside, output={"slices": ()}))[0].tone is Tone.GOOD


@pytest.fixture(scope="module")
def unlabelled(sample) -> ReportData:
    none = dict.fromkeys(("delta_ne", "labelled", "delta_auc", "delta_prediction_ratio"))
    data = with_differences(sample.report, denominator=ENTROPY, **none)
    return with_outputs(data, lambda o: replace(o, metrics=TaskMetrics(None, None, None, None)))


def test_an_output_without_labels_is_named_as_such_wherever_it_is_judged(unlabelled, tmp_path):
    files = rendered(unlabelled, tmp_path)
    page, _ = words_of(files[HTML_NAME])
    markdown = flat(files[MARKDOWN_NAME])
    engine = unlabelled.evaluation("cpu-onnxruntime-cpu-fp8-all", "selection")
    assert engine is not None
    kl = numbers.percent_interval(engine.outputs[0].difference.kl, BUDGET)
    for text in (
        f"Judged on {NO_LABELS}. This concerns ctr.",
        "KL over the mean entropy [95 % interval]",
        "What the change is made of on selection, relative to the mean entropy",
        "Cost (ctr, 1,600 certification rows): KL over the mean entropy",
        f"({NO_LABELS})",
        f"KL {kl}",
    ):
        assert text in markdown
        assert text in page
    (chart, *_) = charts(comparable(unlabelled))
    assert chart.figure["layout"]["yaxis"]["title"]["text"] == "KL over the mean entropy, %"
    # Nothing may pass for a change of normalized entropy, and no metric is made up.
    assert "ΔNE" not in markdown and "ΔNE" not in files[HTML_NAME]
    assert "nan" not in markdown.lower().split()
    assert serde.loads(ReportData, files[JSON_NAME]) == unlabelled


def test_the_terminal_names_it_too(unlabelled, sample):
    text = printed(unlabelled)
    assert "KL, 95 %" in text and "ΔNE" not in text
    assert NO_LABELS in " ".join(text.split())
    others = with_outputs(unlabelled, lambda o: replace(o, output="cvr")).evaluations.evaluations
    known = (e for e in sample.report.evaluations.evaluations if e.plan == "fp32")
    both = EvaluationSet((*known, *(e for e in others if e.plan != "fp32")))
    assert "ΔNE or KL, 95 %" in printed(replace(unlabelled, evaluations=both))


def test_headings_say_how_sure_the_intervals_are(sample, tmp_path):
    """Certification is at 97.5 % where its rows may be looked at twice, as a refresh may."""
    surer = Interval(1e-4, 0.0, 2e-4, 0.975, 1600)
    twice = with_differences(sample.report, "certification", delta_ne=surer)
    text = flat(rendered(twice, tmp_path)[MARKDOWN_NAME])
    assert "ΔNE [95 % interval]" in text and "ΔNE [97.5 % interval]" in text
    before = flat(rendered(sample.report, tmp_path / "before")[MARKDOWN_NAME])
    assert "ΔNE [95 % interval]" in before and "97.5 %" not in before
