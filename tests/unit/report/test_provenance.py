"""Every number that a report shows is in report.json, or follows from it by a named formula."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_run import comparable, with_outputs
from page_numbers import NUMBER, check_numbers, resolve, tables_of
from rich_run import rich
from sample_run import SampleRun
from test_report import rendered

from loka_onnx.core import serde
from loka_onnx.errors import InternalError
from loka_onnx.report import HTML_NAME, JSON_NAME, MARKDOWN_NAME, ReportData, numbers
from loka_onnx.report.document import Cell, Column, Document, Section, Table
from loka_onnx.report.figures import FORMULAS, Place, Pointers, Told, derive, formed, located, shown, told
from loka_onnx.report.sections import build_document


@pytest.fixture(scope="module", params=["fixed rows", "sequential"])
def run(request: pytest.FixtureRequest, sample: SampleRun) -> ReportData:
    return rich(sample.report, sequential=request.param == "sequential")


@pytest.fixture(scope="module")
def document(run: ReportData) -> Document:
    return build_document(run)


@pytest.fixture(scope="module")
def facts(run: ReportData) -> Any:
    return json.loads(serde.dumps(run))


def all_cells(document: Document) -> Iterator[tuple[Table, Column, Cell]]:
    for section in document.sections:
        for table in section.tables:
            for row in table.rows:
                for column, cell in zip(table.columns, row, strict=True):
                    yield table, column, cell


def test_the_sample_fills_every_table(document: Document) -> None:
    """What is not in the sample is not looked at below."""
    tables = [table.caption for section in document.sections for table in section.tables]
    for part in (
        "Candidates on selection", "Candidates on certification", "What the change is made of",
        "Latency per batch size, inputs in host", "Latency per batch size, inputs on the device",
        "Which engine takes", "Why the others", "Throughput", "Plans tried",
        "Worst slices", "Sites in plan", "Precision of each site",
        "What FP8 saves", "What was tried", "Transforms", "Rewritten",
        "do not run as planned", "Splits", "Models", "are no site", "Versions", "Stages",
    ):  # fmt: skip
        assert any(part in caption for caption in tables), part
    assert all(table.rows for section in document.sections for table in section.tables)


WORDS = {"reason", "detail", "remarks"}


def numbered(value: Any, name: str = "") -> Any:
    """A copy of facts in which every reason, detail and remark brings a number."""
    if isinstance(value, str):
        return f"{value}: 12.5 % of 7" if name in WORDS else value
    if isinstance(value, tuple):
        extra = ("rests on 450 groups",) if name == "remarks" else ()
        return (*(numbered(item, name) for item in value), *extra)
    if isinstance(value, dict):
        return {key: numbered(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return replace(value, **{key: numbered(item, key) for key, item in fields.items()})


def test_every_number_of_every_table_is_in_the_json(run: ReportData) -> None:
    """A cell with sources has no number of the words beside it: it is what a page is checked by."""
    data, checked = numbered(run), 0
    facts = json.loads(serde.dumps(data))
    for table, column, cell in all_cells(build_document(data)):
        if column.numeric and NUMBER.search(cell.text):
            assert cell.source, f"{table.caption}, {column.title}: '{cell.text}' has no source"
        if not NUMBER.search(cell.text):
            assert cell.source == "" and cell.value is None
        if cell.source:
            checked += check_numbers(facts, cell.text, cell.source, cell.value)
            assert cell.value is not None
    assert checked > 500


def test_every_formula_is_used_and_told_to_readers(run: ReportData, document: Document) -> None:
    """So that each has been held against its second form."""
    sources = [cell.source for *_, cell in all_cells(document)]
    sources += [Cell(text).source for text in sentences(document)]
    used = set(re.findall(r"(\w+)\(", " ".join(sources)))
    expected = set(FORMULAS)
    if not run.profile.sampling.is_sequential:
        expected -= {"interval_value", "interval_lower", "interval_upper"}
    assert used == expected
    page = (Path(__file__).parents[3] / "docs" / "reference" / "report-json.md").read_text(encoding="utf-8")
    assert [name for name in FORMULAS if not re.search(rf"`{name}[(`]", page)] == []


def test_numbers_of_sentences_have_sources_too(document: Document, facts: Any) -> None:
    """Words of the facts (reasons, names) may hold any digits; what the report writes itself may not."""
    words = words_of(facts)
    checked = 0
    for text in sentences(document):
        if isinstance(text, Told) and text.figures:
            checked += check_numbers(facts, without(text, words), Cell(text).source, None)
            continue
        # How sure an interval is, is said without a source: it must be a confidence of the facts.
        rest = re.sub(r"(\d+(?:\.\d+)?) %", known_confidence(facts), without(text, words))
        assert not NUMBER.search(rest.replace("first 10 slices", "").replace("under 1 %", "")), text
    assert checked > 40


def words_of(facts: Any) -> list[str]:
    """Texts of the facts with digits in them, the longest first; a key that is a number is no word."""
    texts = {leaf for _, leaf in leaves(facts) if isinstance(leaf, str)}
    found = {word for word in texts if re.search(r"\d", word) and not NUMBER.fullmatch(word)}
    return sorted(found, key=len, reverse=True)


def without(text: str, words: list[str]) -> str:
    for word in words:
        text = text.replace(word, "")
    return text


def known_confidence(facts: Any) -> Callable[[re.Match[str]], str]:
    """Removes what is a confidence of the facts, or the per cent of a 99th percentile."""
    known = {f"{100 * value:g}" for value in numbers_under("confidence", facts)}
    return lambda found: "" if found.group(1) in known | {"1"} else found.group()


def numbers_under(name: str, value: Any) -> set[float]:
    return {leaf for key, leaf in leaves(value) if key == name and isinstance(leaf, int | float)}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of facts under its name, however deep; keys stand there as texts too."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield "", key
            yield from leaves(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, name)
    else:
        yield name, value


def sentences(document: Document) -> Iterator[str]:
    for verdict in document.verdicts:
        yield from (verdict.headline, *verdict.facts)
        for stat in verdict.stats:
            yield from (stat.shown.text, stat.note)
    for section in document.sections:
        yield from (*section.paragraphs, *section.items)
        for table in section.tables:
            yield table.caption


@pytest.fixture(scope="module")
def files(run: ReportData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return rendered(run, tmp_path_factory.mktemp("report"))


def test_the_page_carries_value_and_source_of_every_number(files: dict[str, str], facts: Any) -> None:
    page = tables_of(files[HTML_NAME])
    for cell in page.cells:
        if cell.numeric and NUMBER.search(cell.text):
            assert "data-source" in cell.attributes and "data-value" in cell.attributes, cell.text
    words = words_of(facts)
    checked = 0
    for element in page.sourced:
        text = " ".join(element.text.split())
        plain = text if element.numeric else without(text, words)
        value = element.attributes.get("data-value")
        checked += check_numbers(facts, plain, element.attributes["data-source"], value)
    assert checked > 600


def drawings(page: str) -> Iterator[Any]:
    """What is handed to the scripts that draw."""
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL):
        yield json.loads(text)


def test_every_point_of_the_charts_is_in_the_json(run: ReportData, tmp_path: Path) -> None:
    files = rendered(comparable(run), tmp_path)
    facts = json.loads(files[JSON_NAME])
    judged = [
        output["difference"]["delta_ne"]
        for evaluation in facts["value"]["evaluations"]["evaluations"]
        for output in evaluation["outputs"]
        if output["difference"] is not None
    ]
    values = {100 * each["value"] for each in judged}
    above = {100 * (each["upper"] - each["value"]) for each in judged}
    below = {100 * (each["value"] - each["lower"]) for each in judged}
    times = numbers_under("p50_us", facts["value"]["evaluations"])
    points = 0
    for drawing in drawings(files[HTML_NAME]):
        for trace in drawing["data"] if isinstance(drawing, dict) and "layout" in drawing else ():
            bars = trace.get("error_y", {})
            assert set(trace["x"]) <= times and set(trace["y"]) <= values
            assert set(bars.get("array", ())) <= above and set(bars.get("arrayminus", ())) <= below
            points += len(trace["x"])
    assert points >= 2


def test_every_histogram_is_that_of_the_json(files: dict[str, str], facts: Any) -> None:
    sites = facts["value"]["profile"]["sites"]
    (drawn,) = (d for d in drawings(files[HTML_NAME]) if isinstance(d, dict) and "tensors" in d)
    ranges = {name: r["histogram"] for site in sites for name, r in site["operands"].items()}
    assert set(drawn["tensors"]) == set(ranges)
    for name, histogram in drawn["tensors"].items():
        known = ranges[name]
        assert (histogram["first"], histogram["counts"]) == (known["first"], known["counts"])
        assert histogram["total"] == sum(known["counts"]) + known["zeros"]


def test_markdown_has_the_text_of_every_cell_of_the_page(files: dict[str, str], document: Document) -> None:
    flat = " ".join(re.sub(r"\\(.)", r"\1", files[MARKDOWN_NAME]).split())
    page = " ".join("".join(element.text for element in tables_of(files[HTML_NAME]).cells).split())
    for table, column, cell in all_cells(document):
        text = " ".join(cell.text.split())
        assert text in flat, (table.caption, column.title)
        assert text in page, (table.caption, column.title)


def test_a_wrong_number_is_found(document: Document, facts: Any) -> None:
    """The check itself: another digit, another value, another place."""
    cell = next(
        cell for table, column, cell in all_cells(document) if column.title == "p50" and "ms" in cell.text
    )
    assert check_numbers(facts, cell.text, cell.source, cell.value) == 1
    for text, value in (("12.36 ms", cell.value), ("12.35 µs", cell.value), (cell.text, 12_345.679)):
        with pytest.raises(AssertionError):
            check_numbers(facts, text, cell.source, value)
    with pytest.raises(KeyError):
        check_numbers(facts, cell.text, cell.source.replace("p50_us", "p55_us"), cell.value)


def test_a_number_that_is_not_in_the_facts_is_refused(run: ReportData) -> None:
    engine = replace(run.engines[0], bytes=4242)
    section = Section("s", "S", items=(shown(numbers.size, engine, "bytes"),))
    with pytest.raises(InternalError) as raised:
        located(Document("t", "", (), (section,)), Pointers(run))
    assert raised.value.where == "EngineArtifact.bytes"


def test_pointers_are_escaped_as_the_specification_says(run: ReportData) -> None:
    """RFC 6901: ~ and / within a name; RFC 3986: everything that would end a term."""
    left_out = {"a/b~c d,(e)=%25é#": 7}
    data = with_outputs(run, lambda o: replace(o, slices_left_out=left_out))
    places = [Place(left_out, name) for name in left_out] * 2
    text = located((told("{} of {}", formed(numbers.count, derive("sum", *places)), "x"),), Pointers(data))[0]
    document = json.loads(serde.dumps(data))
    assert " " not in Cell(text).source
    assert check_numbers(document, text, Cell(text).source, 14) == 1
    (first, _) = re.findall(r"#[^,)]*", Cell(text).source)
    assert first.endswith("/a~1b~0c%20d%2C%28e%29%3D%2525%C3%A9%23")
    assert resolve(document, first) == 7
