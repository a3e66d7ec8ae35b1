"""The files of a report: their content, the numbers in them, and the schema of report.json."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from changed_run import with_evaluations, with_profile
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console
from rich_run import rich
from sample_run import SampleRun, make_run

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Because, BudgetStatus, Choice, EvaluationSet
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import UserError
from loka_onnx.report import HTML_NAME, JSON_NAME, MARKDOWN_NAME, ReportData, numbers, render, summary_table
from loka_onnx.report.verdict import budget_sentence

VOID = {"meta", "br", "hr", "img", "input", "link"}
NASTY = "x<script>alert(1)</script>|`*[a](http://evil.example)*&lt;"


class Page(HTMLParser):
    """Checks that tags nest, and collects text and references."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in {"src", "href", "action", "srcset"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] == ["script"] else self.text).append(data)


@pytest.fixture(scope="module")
def texts(sample: SampleRun, tmp_path_factory) -> dict[str, str]:
    return rendered(sample.report, tmp_path_factory.mktemp("report"))


def rendered(data: ReportData, directory) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in render(data, directory)}


def words_of(html: str) -> tuple[str, str]:
    """The text of a page in one line, and its scripts."""
    page = Page(html)
    return " ".join(" ".join(page.text).split()), "".join(page.scripts)


def test_the_json_is_the_facts_in_full_precision_and_equal_facts_give_equal_bytes(sample, texts, tmp_path):
    assert serde.loads(ReportData, texts[JSON_NAME]) == sample.report
    assert rendered(sample.report, tmp_path) == texts
    empty = replace(sample.report, engines=(), rewrites={}, lineage=(), notes=())
    files = rendered(replace(empty, evaluations=EvaluationSet(()), choice=Choice(())), tmp_path / "empty")
    Page(files[HTML_NAME])
    assert "Nothing was rewritten." in files[MARKDOWN_NAME]


def test_both_texts_say_the_same(texts):
    page, _ = words_of(texts[HTML_NAME])
    flat = re.sub(r"\\(.)", r"\1", " ".join(texts[MARKDOWN_NAME].split()))
    for sentence in (
        "No FP8 engine is emitted for this target: it gets high precision (fp32).",
        "undecided against the budget of 0.02 %; about 123,456 rows would decide it",
        "Not chosen: declined: the CPU provider has no BF16 products.",
        "planned fp8, runs in BFloat16 × BFloat16: layer 3 of the engine inspector",
        "simulated: speed never counts",
        "folded: discarded, because an output moved by 0.31; the tolerance is 1e-05",
        "its input has one consumer",
        "SYNTHETIC DATA",
        "a click, drawn from the FP32 model's own probability",
    ):
        assert sentence in page
        assert sentence in flat


def test_the_page_needs_nothing_from_anywhere(texts):
    page = Page(texts[HTML_NAME])
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert "default-src 'none'" in texts[HTML_NAME]
    styles = re.findall(r"<style>(.*?)</style>", texts[HTML_NAME], re.DOTALL)
    assert styles
    assert not any("url(" in style or "@import" in style for style in styles)
    assert "color-scheme: light dark" in styles[0]


def test_the_page_carries_plotly_only_for_a_chart(sample, texts, tmp_path):
    page = texts[HTML_NAME]
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', page).group(1)
    assert b"plotly.js" in gzip.decompress(base64.b64decode(packed))[:500]
    # Packed, it is far smaller than the library itself.
    assert 1_000_000 < len(page) < 2_500_000
    without = replace(with_profile(sample.report, sites=()), evaluations=EvaluationSet(()))
    small = rendered(without, tmp_path)[HTML_NAME]
    assert len(small) < 150_000
    assert 'id="plotly"' not in small


def test_names_cannot_become_markup(tmp_path):
    run = make_run(tmp_path / "run", prefix=NASTY)
    engines = tuple(replace(e, target=NASTY) for e in run.report.engines)
    data = replace(run.report, title=f"{NASTY}\n# injected", engines=engines)
    named = with_evaluations(data, lambda e: replace(e, engine=e.engine.replace("cpu-", f"{NASTY}-", 1)))
    files = rendered(named, tmp_path / "report")
    plain, page = Page(rendered(run.report, tmp_path / "plain")[HTML_NAME]), Page(files[HTML_NAME])
    assert page.tags.count("script") == plain.tags.count("script")
    assert "alert(1)" in " ".join(page.text)
    assert not any("<script>alert" in script for script in page.scripts)
    assert not any("<a href" in script for script in page.scripts[1:])
    markdown = files[MARKDOWN_NAME]
    assert "<script" not in markdown and "\n# injected" not in markdown
    # An independent parser finds no HTML and no link, and the name as it was in the text.
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    kinds = {token.type for token in tokens} | {c.type for token in tokens for c in token.children or ()}
    assert not {"html_block", "html_inline", "link_open", "em_open", "image"} & kinds
    assert any(NASTY in "".join(c.content for c in t.children) for t in tokens if t.children)


@pytest.mark.parametrize(
    ("upper", "because", "words"),
    [
        (0.1, (), "a hundred times as many rows would not tell on which side"),
        (math.inf, (), "these are too few for an interval"),
        (0.1, (Because.MAX_KL,), "what is accepted beside it"),
    ],
)
def test_a_budget_that_no_number_of_rows_decides_says_why(sample, upper, because, words):
    (output,) = next(e for e in sample.report.evaluations.evaluations if e.outputs[0].difference).outputs
    change = replace(output.difference.delta_ne, upper=upper)
    difference = replace(output.difference, delta_ne=change)
    changes = {"difference": difference, "because": because, "rows_to_decide": None, "remarks": ()}
    undecided = replace(output, budget_status=BudgetStatus.UNDECIDED, **changes)
    assert budget_sentence(undecided).endswith(words)


def test_real_data_is_not_stamped(sample, tmp_path):
    description = replace(sample.report.data, synthetic=False)
    data = replace(with_profile(sample.report, synthetic=False), data=description)
    files = rendered(data, tmp_path)
    assert "SYNTHETIC" not in files[MARKDOWN_NAME]
    assert "SYNTHETIC" not in " ".join(Page(files[HTML_NAME]).text)
    calibrated_on_synthetic = replace(data, profile=sample.report.profile)
    assert "SYNTHETIC" in rendered(calibrated_on_synthetic, tmp_path)[MARKDOWN_NAME]


def printed(data: ReportData, target: str = "cpu", width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(summary_table(data, target, "selection"))
    return console.export_text()


def test_the_terminal_table_shows_every_candidate_of_a_target_in_80_columns(sample):
    text = printed(sample.report)
    for plan in ("fp32 *", "fp8-safe", "fp8-all", "bf16"):
        assert plan in text
    for engine in sample.report.engines:
        evaluation = sample.report.evaluation(engine.id, "selection")
        for output in evaluation.outputs if evaluation else ():
            assert numbers.plus_minus(output.difference.delta_ne, output.budget) in text
    assert "123.4 µs" in text
    assert re.search(r"bf16 .* declined", text) and "failed" not in text
    assert "SYNTHETIC DATA" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_terminal_table_reads_no_markup_in_names(sample):
    engines = tuple(replace(e, target="[red]x[/red]", plan="[b]p") for e in sample.report.engines)
    data = replace(sample.report, engines=engines, title="[bold]t")
    text = printed(data, "[red]x[/red]", 200)
    assert "[red]x[/red]" in text and "[bold]t" in text and "[b]p" in text


def between(lower: float, value: float, upper: float) -> Interval:
    return Interval(value, lower, upper, 0.95, 1000)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (between(-0.00001, 0.00012, 0.00025), "+0.012 % [-0.001 %, +0.025 %]"),
        (between(0.01, 0.02, 0.03), "+2.00 % [+1.00 %, +3.00 %]"),
        (between(1.1e-7, 1.2e-7, 1.3e-7), "+0.0000120 % [+0.0000110 %, +0.0000130 %]"),
        (between(0, 0, 0), "0 % [0 %, 0 %]"),
        (between(-1e-3, -1e-9, 1e-3), "0 % [-0.10 %, +0.10 %]"),
        (between(float("-inf"), 0, float("inf")), "0 % [-inf, inf]"),
    ],
)
def test_a_relative_change_shows_its_sign_and_the_digits_of_its_interval(interval, text):
    assert numbers.percent_interval(interval) == text
    # Far below the budget it is 0.
    exact = between(-1.3e-9, 4e-10, 2.1e-9)
    assert numbers.plus_minus(exact, 0.0002) == "0 %"
    assert numbers.percent_interval(exact, 0.0002) == "0 % [0 %, 0 %]"
    assert not numbers.is_symmetric(between(0.0, 1e-5, 4e-5))


@pytest.mark.parametrize("upper", [0.00020001, 0.00019999])
def test_rounding_never_lays_an_end_on_the_budget(upper):
    text = numbers.percent_interval(between(-0.001, 0.0001, upper), budget=0.0002)
    shown = float(text.split(", ")[1].removesuffix(" %]"))
    assert (shown > 0.02) == (upper > 0.0002)
    assert shown != 0.02


def test_a_budget_that_is_no_short_decimal_takes_no_more_digits_than_another():
    interval = between(0.0003, 0.0008, 0.0013102576)
    for budget in (None, 0.0002, 0.002 / 3, 0.0004 / 7):
        assert numbers.percent_interval(interval, budget) == "+0.080 % [+0.030 %, +0.131 %]"
    # The upper end lies just beyond: as many digits as tell it from the budget, and no more.
    for beyond, text in (
        (4e-8, "+0.050 % [+0.030 %, +0.067 %]"),
        (-4e-8, "+0.05000 % [+0.03000 %, +0.06666 %]"),
    ):
        near = between(0.0003, 0.0005, 0.002 / 3 + beyond)
        assert numbers.percent_interval(near, 0.002 / 3) == text


@given(
    value=st.floats(-0.01, 0.01),
    half=st.floats(1e-6, 0.01),
    budget=st.sampled_from([0.0002, 0.0005, 0.001, 0.002 / 3, 0.0004 / 7]),
)
def test_what_is_read_off_an_interval_is_the_verdict(value, half, budget):
    interval = between(value - half, value, value + half)
    text = numbers.percent_interval(interval, budget)
    lower, upper = (float(part.strip(" %]")) for part in text.split("[")[1].split(","))
    for shown, exact in ((lower, interval.lower), (upper, interval.upper)):
        # Two digits of the half-width, but nothing far below a hundredth of the budget.
        assert abs(shown - 100 * exact) <= max(0.05 * 100 * half, 0.005 * 100 * budget) + 1e-8
        # Eight decimals are the most that is shown: an end nearer than that may look to be on the budget.
        if abs(exact - budget) > 1e-9:
            assert (shown > 100 * budget) == (exact > budget)


@given(
    value=st.floats(-0.01, 0.01),
    half=st.floats(1e-8, 0.01),
    budget=st.sampled_from([0.0002, 0.001, 0.002 / 3]),
)
def test_what_is_read_off_a_symmetric_interval_is_the_verdict(value, half, budget):
    interval = between(value - half, value, value + half)
    shown, _, width = numbers.plus_minus(interval, budget).partition(" ± ")
    upper = sum(float(part.strip(" %")) for part in (shown, width) if part)
    if abs(interval.upper - budget) > 1e-8:
        assert (upper > 100 * budget + 1e-12) == (interval.upper > budget)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.budget_percent(0.0002), "0.02 %"),
        (numbers.budget_percent(0.00025), "0.025 %"),
        (numbers.share(0.6324), "63.2 %"),
        (numbers.error_percent(0.0231), "2.31 %"),
        (numbers.metric(0.812345), "0.81234"),
        (numbers.size(999), "999 B"),
        (numbers.size(1 << 20), "1.0 MiB"),
        (numbers.size(5 << 30), "5.00 GiB"),
        (numbers.latency(123.44), "123.4 µs"),
        (numbers.latency(12_345.0), "12.35 ms"),
        (numbers.seconds(0.0123), "12.3 ms"),
        (numbers.count(1234567), "1,234,567"),
    ],
)
def test_units(text, expected):
    assert text == expected


PUBLISHED = Path(__file__).parents[3] / "docs" / "report-schema.json"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(PUBLISHED.read_text(encoding="utf-8")))


@pytest.mark.parametrize("is_sequential", [False, True])
def test_the_report_of_a_run_fits(sample, validator, is_sequential):
    validator.validate(json.loads(serde.dumps(sample.report)))
    validator.validate(json.loads(serde.dumps(rich(sample.report, sequential=is_sequential))))


def output_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["value"]["evaluations"]["evaluations"][1]["outputs"][0]


Break = Callable[[dict[str, Any]], object]
BREAKS: dict[str, Break] = {
    "another version": lambda d: d.update(schema="loka-onnx/report/6"),
    "no value": lambda d: d.pop("value"),
    "a key beside the value": lambda d: d.update(more=1),
    "a field is missing": lambda d: d["value"].pop("title"),
    "an unknown key": lambda d: d["value"].update(colour="red"),
    "a field of an engine is missing": lambda d: d["value"]["engines"][0].pop("digest"),
    "a status that there is not": lambda d: d["value"]["engines"][0].update(status="fine"),
    "text for a number": lambda d: d["value"]["plans"]["plans"][0].update(fp8_share="half"),
    "a fraction for a count": lambda d: d["value"]["profile"].update(rows=0.5),
    "a number for a flag": lambda d: d["value"]["data"].update(synthetic=2),
    "an interval without its end": lambda d: output_of(d)["difference"]["kl"].pop("upper"),
    "a mapping for a list": lambda d: d["value"].update(lineage={}),
    "an unknown key in a slice": lambda d: output_of(d)["slices"][0].update(p=0.5),
    "null for a rewrite": lambda d: d["value"]["rewrites"].update(mods=None),
    "a wrong saving": lambda d: d["value"]["plans"]["speeds"][0]["saved_us"].update({"64": "much"}),
    "a missing sum": lambda d: d["value"]["profile"]["groups"][0]["sensitivities"][0].pop("kl_moments"),
    "a wrong scale": lambda d: d["value"]["profile"]["scales"]["e4m3fn/amax"].update(dense="large"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_does_not_fit(sample, validator, name):
    """Nor is it read: the schema and the reader agree."""
    document = json.loads(serde.dumps(rich(sample.report)))
    BREAKS[name](document)
    assert not validator.is_valid(document)
    with pytest.raises(UserError):
        serde.loads(ReportData, json.dumps(document))
