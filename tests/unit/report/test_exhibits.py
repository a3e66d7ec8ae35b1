"""The page's histograms, charts and tables of sites, against the facts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from changed_run import with_differences, with_evaluations, with_profile, with_ranges
from decided_run import CURVE, decided
from sample_run import SampleRun

from loka_onnx.core.evaluation import CalibrationBin, Evaluation, EvaluationSet, Latency
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet, SiteSpeed, SpeedVerdict
from loka_onnx.core.profile import ENTROPY, Draws, Sampling, Sensitivity
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.chart import calibration_charts, charts
from loka_onnx.report.document import Section
from loka_onnx.report.histograms import activation_table, activations, histogram_data
from loka_onnx.report.site_tables import calibration_facts, open_sites, sites_section, speed_texts
from loka_onnx.report.slice_tables import scores_sections


def test_shares_are_those_of_one_model_whatever_mods_padded(sample: SampleRun) -> None:
    first, *rest = sample.report.modified.sites
    padded = replace(sample.report.modified, sites=(replace(first, k=20), *rest))
    data = replace(sample.report, modified=padded)
    flops = [2 * site.k * site.n for site in padded.sites[:2]]
    expected = [f"{100 * f / sum(flops):.1f} %" for f in flops]
    section = sites_section(data)
    (table,) = (t for t in section.tables if t.caption.startswith("Sites in plan"))
    place = [column.title for column in table.columns].index("FLOP share")
    assert [row[place].text for row in table.rows] == [*expected, "–"]
    assert "of the model after mods" in " ".join(section.paragraphs)


def test_each_device_says_the_speed_of_a_site_and_nothing_is_guessed(sample: SampleRun) -> None:
    first, second, third = (site.name for site in sample.report.modified.sites)
    speeds = [
        SiteSpeed(site, device, verdict, {}, {}, "dense", True, "times")
        for site, device, verdict in (
            (first, "gpu", SpeedVerdict.FAST),
            (second, "gpu", SpeedVerdict.UNKNOWN),
            (first, "cpu", SpeedVerdict.SLOW),
        )
    ]
    one, two = (
        speed_texts(replace(sample.report, plans=PlanSet(sample.report.plans.plans, (), known)))
        for known in (tuple(speeds[:2]), tuple(speeds))
    )
    assert one == {first: "fast", second: "not measured"}
    assert two == {first: "gpu: fast; cpu: slow", second: "gpu: not measured; cpu: not measured"}
    assert third not in one


def test_calibration_is_drawn_of_what_is_emitted_and_the_reference_beside_it(sample: SampleRun) -> None:
    data = decided(sample.report)
    reference = next(e for e in data.evaluations.evaluations if e.engine in data.references)
    output = replace(reference.outputs[0], calibration=(CalibrationBin(1600, 0.1, 0.2),))
    certified = replace(reference, split="certification", outputs=(output,))
    data = replace(data, evaluations=EvaluationSet((*data.evaluations.evaluations, certified)))
    (chart,) = calibration_charts(data)
    assert [(t["name"], t["x"], t["y"]) for t in chart.figure["data"]] == [
        (reference.engine, [0.1], [0.2]),
        ("gpu-onnxruntime-sm90-fp8-safe", [b.predicted for b in CURVE], [b.observed for b in CURVE]),
    ]
    (section,) = scores_sections(data)
    drift, bins = section.tables
    assert [cell.text for cell in drift.rows[0][2:]] == ["-0.021", "+0.00031", "+0.019"]
    assert [cell.text for cell in bins.rows[-1][2:]] == ["800", "0.24000", "0.25000"]
    assert calibration_charts(sample.report) == () == scores_sections(sample.report)


@pytest.fixture
def found(sample: SampleRun) -> dict[str, Any]:
    """What is drawn of a run with a histogram for each site."""
    data = with_ranges(sample.report, histogram=MagnitudeHistogram(5, 1000, (3, 0, 2)))
    return histogram_data(data, data.plan("fp8-safe"))


def test_bounds_are_those_at_which_the_format_rounds(found: dict[str, Any]) -> None:
    import ml_dtypes

    (activation,) = found["sites"][0]["activations"]
    zero, normal, largest = (2**bound for bound in activation["bounds"])
    scale = 6.0 / 448

    def rounded(magnitude: float) -> float:
        return float(np.float32(magnitude / scale).astype(ml_dtypes.float8_e4m3fn))

    assert rounded(zero * 0.999) == 0.0 < rounded(zero * 1.001)
    assert rounded(normal) == float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).smallest_normal)
    assert rounded(largest) == float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def test_every_site_is_named_with_what_is_known_of_it(sample: SampleRun, found: dict[str, Any]) -> None:
    assert [site["name"] for site in found["sites"]] == [site.name for site in sample.report.modified.sites]
    assert found["tensors"]["dense"] == {"first": 1000, "counts": (3, 0, 2), "total": 10}
    assert found["sites"][2]["activations"] == []
    assert found["sites"][1]["verdict"] == "unsafe"
    json.dumps(found, allow_nan=False)
    table = activation_table(sample.report, sample.report.plan("fp8-safe"))
    row = dict(zip((c.title for c in table.columns), (cell.text for cell in table.rows[0]), strict=True))
    # Of the error pass: 5 of 1000 became zero, 2 saturated.
    assert (row["Underflowed to zero"], row["Saturated"], row["Zeros"]) == ("0.5 %", "0.2 %", "0 %")
    assert row["Scale"] == "0.0134"


def timed(data: ReportData) -> ReportData:
    """Every evaluation gets a latency of its own; engines are not simulated."""
    times = (Latency(64, 100.0 - place, 1.0, 1.0, 9, "cpu", True) for place in count())
    engines = tuple(replace(e, simulated=False) for e in data.engines)
    data = with_evaluations(data, lambda e: replace(e, latencies=(next(times),)))
    return replace(data, engines=engines)


def test_every_candidate_is_a_point_or_is_named(sample: SampleRun) -> None:
    for data in (sample.report, timed(sample.report)):
        for chart in charts(data):
            traces = chart.figure["data"] if chart.figure else ()
            points = [name for trace in traces for name in trace.get("text", ())]
            engines = [e for e in data.engines if chart.name == f"ctr on {e.target}"]
            assert len(points) + len(chart.left_out) == len(engines)
    # An interval without an end is no point.
    endless = Interval(0.0, -math.inf, math.inf, 0.95, 1)
    data = with_differences(timed(sample.report), delta_ne=endless)
    assert charts(data) and all(chart.figure is None for chart in charts(data))


def test_points_stand_at_their_latency_and_change(sample: SampleRun) -> None:
    data = timed(sample.report)
    chart = next(c for c in charts(data) if c.name == "ctr on cpu")
    points = [trace for trace in chart.figure["data"] if "hovertext" in trace]
    found = {y for trace in points for y in trace["y"]}
    # A certified engine was timed twice here; the last time counts.
    assert sum(len(trace["x"]) for trace in points) == 3
    assert found == {
        100 * e.outputs[0].difference.delta_ne.value
        for e in data.evaluations.evaluations
        if e.split == "selection" and e.outputs[0].difference is not None
    }
    emitted = next(trace for trace in chart.figure["data"] if trace["name"] == "emitted")
    assert emitted["y"] == [0.0]


def test_what_was_timed_on_another_device_only_says_where(sample: SampleRun) -> None:
    data = timed(sample.report)
    there = "cpu-onnxruntime-cpu-fp8-all"

    def left_out(batch: int, *elsewhere: str) -> list[str]:
        def moved(e: Evaluation) -> Evaluation:
            latency = Latency(batch if e.engine == there else 64, 9.0, 9.0, 9.0, 9, "H200", False)
            return replace(e, latencies=(latency,)) if e.engine in elsewhere else e

        chart = next(c for c in charts(with_evaluations(data, moved)) if c.name == "ctr on cpu")
        return [line for line in chart.left_out if line.startswith(there)]

    assert left_out(64, there) == [f"{there}: latency 9.0 µs at batch 64 on H200, not the target"]
    # Nothing was timed on the target: there is no batch that it could have been timed at.
    every = {e.engine for e in data.evaluations.evaluations}
    assert left_out(8, *every) == [f"{there}: latency 9.0 µs at batch 8 on H200, not the target"]


def with_sensitivities(data: ReportData, change: Callable[[Sensitivity], Sensitivity]) -> ReportData:
    sites = tuple(
        replace(entry, sensitivities=tuple(map(change, entry.sensitivities))) for entry in data.profile.sites
    )
    return with_profile(data, sites=sites)


def column(section: Section, title: str) -> list[str]:
    """Texts of a column of the table of sites."""
    (table,) = (t for t in section.tables if t.caption.startswith("Sites in plan"))
    titles = [c.title for c in table.columns]
    return [row[titles.index(title)].text for row in table.rows]


def test_kl_and_the_labelled_part_stand_apart_with_their_intervals(sample) -> None:
    section = sites_section(sample.report)
    kl, labelled = column(section, "KL"), column(section, "Labelled")
    # 1.96 standard errors of 5e-7 and 4e-5 (t with 1999 degrees of freedom).
    assert kl[:2] == ["+0.001200 % [+0.001102 %, +0.001298 %]"] * 2
    assert labelled[:2] == ["-0.0003 % [-0.0081 %, +0.0075 %]"] * 2
    assert kl[2] == labelled[2] == numbers.NOT_MEASURED
    assert column(section, "Rows measured") == ["2,000", "2,000", numbers.NONE]
    assert "both relative to the loss, for this site alone" in section.paragraphs[-3]
    assert section.paragraphs[-1].startswith("Each interval holds with 95 %. It says nothing of other draws")


def test_a_kept_site_shows_the_recipe_that_its_verdict_is_of(sample) -> None:
    """Errors are measured under several recipes, effects under the one that a plan would use."""
    (first, second), plan = sample.report.profile.sites, sample.report.plan("fp8-safe")
    (error,), (sensitivity,) = second.errors, second.sensitivities
    assert plan.decision(second.site).recipe is None
    best = PER_CHANNEL_WEIGHT.id
    entry = replace(
        second,
        errors=(error, replace(error, recipe=best, count=2000)),
        sensitivities=(replace(sensitivity, recipe=best),),
    )
    data = with_profile(sample.report, sites=(first, entry))
    section = sites_section(data)
    assert column(section, "Recipe measured")[:2] == [PER_TENSOR.id, best]
    assert column(section, "KL")[1] == "+0.001200 % [+0.001102 %, +0.001298 %]"
    assert column(section, "Rows measured")[1] == "2,000"
    drawn = {found.site: found for found in activations(data, plan)}
    assert drawn[second.site].recipe == PER_CHANNEL_WEIGHT
    assert drawn[second.site].error == entry.errors[1]


def test_columns_of_sites_with_draws_without_labels_and_where_rows_were_added(sample) -> None:
    draws = Draws(4, 1.1e-5, 1.9e-5, 1.5, -1e-5, 2e-5)
    section = sites_section(with_sensitivities(sample.report, lambda s: replace(s, draws=draws)))
    assert column(section, "KL over draws")[0] == "0.0011 % to 0.0019 % (4)"
    none = {"denominator": ENTROPY, "labelled_moments": None, "labelled": None}
    section = sites_section(with_sensitivities(sample.report, lambda s: replace(s, **none)))
    assert "relative to the mean entropy of the predictions (no labels)" in " ".join(section.paragraphs)
    assert column(section, "Labelled")[0] == column(section, "KL over draws")[0] == numbers.NONE
    # Where rows were added until verdicts were reached, intervals are wider.
    sampling = Sampling(2000, 1, 16384, may_stop_early=True)
    section = sites_section(with_profile(sample.report, sampling=sampling))
    interval = sample.report.profile.sites[0].sensitivities[0].kl_moments.anytime_interval(16384)
    assert interval.upper > 1.35e-5
    assert column(section, "KL")[0] == numbers.percent_interval(interval)
    assert "holds with 95 % at every number of rows at once" in section.paragraphs[-1]


def test_sites_that_stayed_undecided_are_named(sample) -> None:
    sampling = Sampling(2000, 3, 16384, ("over_arch.fc0", "over_arch.fc1"), may_stop_early=True)
    data = with_profile(sample.report, sampling=sampling)
    said = (
        "Undecided when the rows ended, after 2,000: over_arch.fc0, over_arch.fc1. More rows may decide them"
    )
    assert open_sites(data.profile) == [said] == list(sites_section(data).items)
    assert open_sites(sample.report.profile) == []


EARLY = Sampling(1024, 2, 16384, may_stop_early=True)
ADDED = {
    "data_digest": "a" * 64 + "+" + "b" * 64,
    "sampling": Sampling(4000, 3, 16384, ("x",), may_stop_early=True),
}


@pytest.mark.parametrize(
    ("changes", "sensitivities", "more"),
    [
        ({}, "2,000", []),
        ({"sampling": EARLY}, "1,024", ["Sensitivities stopped where the verdict of every site was reached"]),
        (ADDED, "4,000", ["Calibration rows were added to those of the split: digest bbbbbbbbbbbbbbbb"]),
    ],
)
def test_the_rows_that_were_looked_at(sample, changes, sensitivities, more) -> None:
    rows = f"Ranges: 4,000 rows; errors: 512 rows; sensitivities: {sensitivities} rows"
    profile = replace(sample.report.profile, error_rows=512, **changes)
    assert calibration_facts(profile) == [rows, *more]


def test_the_caption_of_the_sites_counts_no_selection_rows(sample) -> None:
    captions = [table.caption for table in sites_section(with_profile(sample.report, error_rows=512)).tables]
    assert any("measured on 512 calibration rows" in caption for caption in captions)
