import base64
import dataclasses
import gzip
import io
import math
import re
from html.parser import HTMLParser

import pytest
from changed_run import with_evaluations, with_profile
from markdown_it import MarkdownIt
from rich.console import Console
from sample_run import SampleRun

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Because, BudgetStatus, Choice, EvaluationSet
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


def test_the_json_is_the_facts_in_full_precision(sample, texts):
    assert serde.loads(ReportData, texts[JSON_NAME]) == sample.report


def test_equal_facts_give_equal_bytes(sample, texts, tmp_path):
    assert rendered(sample.report, tmp_path) == texts


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
    without = dataclasses.replace(with_profile(sample.report, sites=()), evaluations=EvaluationSet(()))
    small = rendered(without, tmp_path)[HTML_NAME]
    assert len(small) < 150_000
    assert 'id="plotly"' not in small


def test_names_cannot_become_markup(tmp_path):
    from sample_run import make_run

    run = make_run(tmp_path / "run", prefix=NASTY)
    engines = tuple(dataclasses.replace(e, target=NASTY) for e in run.report.engines)
    data = dataclasses.replace(run.report, title=f"{NASTY}\n# injected", engines=engines)
    named = with_evaluations(
        data, lambda e: dataclasses.replace(e, engine=e.engine.replace("cpu-", f"{NASTY}-", 1))
    )
    files = rendered(named, tmp_path / "report")
    plain = Page(rendered(run.report, tmp_path / "plain")[HTML_NAME])
    page = Page(files[HTML_NAME])
    assert page.tags.count("script") == plain.tags.count("script")
    assert "alert(1)" in " ".join(page.text)
    assert not any("<script>alert" in script for script in page.scripts)
    assert not any("<a href" in script for script in page.scripts[1:])
    markdown = files[MARKDOWN_NAME]
    assert "<script" not in markdown
    # An independent parser finds no HTML and no link, and the name as it was in the text.
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    inline = [child for token in tokens for child in token.children or ()]
    assert not {"html_inline", "link_open", "em_open", "image"} & {token.type for token in inline}
    assert "html_block" not in {token.type for token in tokens}
    assert any(NASTY in "".join(c.content for c in t.children) for t in tokens if t.children)
    assert "\n# injected" not in markdown


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
    change = dataclasses.replace(output.difference.delta_ne, upper=upper)
    difference = dataclasses.replace(output.difference, delta_ne=change)
    changes = {"difference": difference, "because": because, "rows_to_decide": None, "remarks": ()}
    undecided = dataclasses.replace(output, budget_status=BudgetStatus.UNDECIDED, **changes)
    assert budget_sentence(undecided).endswith(words)


def test_real_data_is_not_stamped(sample, tmp_path):
    description = dataclasses.replace(sample.report.data, synthetic=False)
    data = dataclasses.replace(with_profile(sample.report, synthetic=False), data=description)
    files = rendered(data, tmp_path)
    assert "SYNTHETIC" not in files[MARKDOWN_NAME]
    assert "SYNTHETIC" not in " ".join(Page(files[HTML_NAME]).text)
    calibrated_on_synthetic = dataclasses.replace(data, profile=sample.report.profile)
    assert "SYNTHETIC" in rendered(calibrated_on_synthetic, tmp_path)[MARKDOWN_NAME]


def test_an_empty_run_still_renders(sample, tmp_path):
    empty = dataclasses.replace(sample.report, engines=(), rewrites={}, lineage=(), notes=())
    empty = dataclasses.replace(empty, evaluations=EvaluationSet(()), choice=Choice(()))
    files = rendered(empty, tmp_path)
    Page(files[HTML_NAME])
    assert "Nothing was rewritten." in files[MARKDOWN_NAME]


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
    engines = tuple(dataclasses.replace(e, target="[red]x[/red]", plan="[b]p") for e in sample.report.engines)
    data = dataclasses.replace(sample.report, engines=engines, title="[bold]t")
    text = printed(data, "[red]x[/red]", 200)
    assert "[red]x[/red]" in text and "[bold]t" in text and "[b]p" in text
