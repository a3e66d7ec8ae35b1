"""The results pages: every figure is one of a record, misses are said, and any record can be shown."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.results import engines
from benchmarks.results.catalog import entry_of
from benchmarks.results.formats import FIXED, interval, number, percent, spread
from benchmarks.results.pages import result_pages
from benchmarks.results.records import Record, load_records

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
SOURCES = ROOT / "benchmarks" / "results"
NAMES = re.compile(
    r"FP(?:32|16|8)|BF16|INT8|fp(?:32|16|8)|[NEMS]\d|p\d\d|1 MiB|sha256|2020-12|MovieLens 1M|10_s|95 %"
)


def test_every_record_has_its_section_and_its_file() -> None:
    pages = result_pages(RECORDS)
    text = "".join(held for address, held in pages.items() if address.endswith(".md"))
    for path in RECORDS.glob("*.json"):
        assert f"{{ #{path.stem} }}" in text
        assert pages[f"results/records/{path.name}"] == path.read_text()
        assert f"(records/{path.name})" in text


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDS.glob("*.json")))
def test_every_figure_of_a_section_is_one_of_the_record(name: str) -> None:
    """Without the record's figures no number with a fraction is left, but for keys and settings."""
    record = load_records(RECORDS)[name]
    entry = entry_of(name)
    assert entry is not None, "the catalog knows every record that is committed"
    assert fractions_of(entry.render(record))
    emptied = Record(**{**vars(record), "figures": without_figures(record.figures)})
    settings = fractions_of(json.dumps(record.settings))
    keys = fractions_of(" ".join(keys_of(record.figures)))
    left = fractions_of(entry.render(emptied)) - settings - keys
    assert {float(each) for each in left} <= {100 * record.settings.get("budget", 0.0)}
    assert "nan" in entry.render(emptied)


def test_a_changed_figure_changes_its_cell() -> None:
    record = load_records(RECORDS)["trained-wukong-large"]
    figures = json.loads(json.dumps(record.figures))
    chosen = figures["batches"]["512"]["chosen"]
    figures["engines"][chosen]["certification"]["delta_ne_percent"] = [0.0123, 0.0012, 0.0234]
    figures["batches"]["512"]["ratios"]["chosen over today"] = 7.654
    text = engines.trained(Record(**{**vars(record), "figures": figures}))
    assert "+0.012~% [+0.001,~+0.023]".replace("~", FIXED) in text and "7.65×" in text
    assert "7.65×" not in engines.trained(record)


def without_figures(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_figures(held) for key, held in value.items()}
    if isinstance(value, list):
        return [without_figures(held) for held in value]
    if isinstance(value, float):
        return float("nan")
    return re.sub(r"\d*\.\d+", "#", value) if isinstance(value, str) else value


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (key.replace("_", " ") for key in value)
        value = list(value.values())
    if isinstance(value, list):
        for held in value:
            yield from keys_of(held)


def fractions_of(text: str) -> set[str]:
    """Numbers with a fraction, in tables, charts and sentences."""
    return set(re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r'style="[^"]*"', "", text)))


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.py")), ids=lambda path: path.stem)
def test_no_figure_stands_in_the_sources(path: Path) -> None:
    """Numbers in texts would be figures that no record holds; names of formats are none."""
    tree = ast.parse(path.read_text())
    documented = {
        id(held)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        for held in ast.walk(node.body[0])
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documented:
            continue
        if path.stem == "aims" or "benchmarks." in node.value or "<" in node.value:
            continue
        assert not re.search(r"\d", NAMES.sub("", node.value)) or _is_code(node.value), node.value


def _is_code(text: str) -> bool:
    """Formats of numbers, keys and file names."""
    return re.fullmatch(r"[.+,\w{}:-]*", text) is not None


def test_what_was_missed_is_said(tmp_path: Path) -> None:
    shutil.copy(RECORDS / "serve_soak.json", tmp_path)
    document = json.loads((tmp_path / "serve_soak.json").read_text())
    document["figures"]["answers"]["wrong"] = 12345
    (tmp_path / "serve_soak.json").write_text(json.dumps(document))
    pages = result_pages(tmp_path)
    first, fleet = pages["results/index.md"], pages["results/fleet.md"]
    missed = first[first.index("## What was missed") : first.index("## Every record")]
    assert "2 of 3 aims are met" in missed and "answers: wrong | 0 | 12,345" in missed
    assert "| answers: wrong | 0 | 12,345 | **missed** |" in fleet
    assert "| answers: errors | 0 | 0 | met |" in fleet


def test_a_record_that_nobody_announced_is_shown_as_it_is(tmp_path: Path) -> None:
    figures = {
        "rows": 61440,
        "by model": {"a": {"time_us": 12.34, "ok": True}, "b": {"time_us": 5.6, "ok": False}},
        "ratio": {"min": 1.0, "median": 1.5, "max": 2.0},
        "shapes": [{"m": 16, "us": 3.25}, {"m": 32, "us": 4.5}],
        "uneven": {"x": {"deep": {"value": 0.125}}},
    }
    document = {"benchmark": "new_thing", "date": "2026-01-02", "machine": {}, "versions": {}}
    (tmp_path / "new_thing.json").write_text(json.dumps(document | {"settings": {}, "figures": figures}))
    text = result_pages(tmp_path)["results/others.md"]
    assert "## new thing { #new_thing }" in text
    spread_of = "1.50 (1.00~to~2.00)".replace("~", FIXED)
    for cell in ("| rows | 61,440 |", "| a | 12.3 | yes |", spread_of, "| 16 | 3.25 |", "0.125"):
        assert cell in text, cell


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "–"), (3, "3"), (1234567, "1,234,567"), (0.0, "0"), (1.0, "1.00"), (-0.01234, "−0.0123")),
        *((215488.05, "215,488"), (1.5e-9, "1.50e-09"), (True, "yes"), ("text", "text"), (np.inf, "inf")),
    ],
)
def test_numbers_have_three_digits(value: object, text: str) -> None:
    assert number(value) == text


def test_intervals_have_the_digits_that_their_width_allows() -> None:
    assert interval([0.004123, 0.000712, 0.007531]) == "+0.0041~% [+0.0007,~+0.0075]".replace("~", FIXED)
    assert interval([-1.0, -2.0, 3.0]) == "−1.0~% [−2.0,~+3.0]".replace("~", FIXED)
    assert interval(None) == "–"
    assert interval([0.0, 0.0, 0.0]) == "+0.000~% [+0.000,~+0.000]".replace("~", FIXED)
    assert percent(0.0231) == f"2.31{FIXED}%"
    found = spread({"median": 2.0, "min": 1.0, "max": 4.0}, " s")
    assert found == "2.00 s (1.00~to~4.00)".replace("~", FIXED)
