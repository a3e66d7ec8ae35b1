"""Two runs compared, and the forms in which a difference is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from changed_run import with_latencies, with_plans, with_target
from page_numbers import NUMBER, check_numbers, tables_of
from rich_run import rich
from sample_run import SampleRun
from two_runs import compared, costing, emitting, named, slower, texts, write_run

from loka_onnx.core import serde
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Verdict
from loka_onnx.core.rewrite import Declined, RewriteLog
from loka_onnx.core.serde import schema_id
from loka_onnx.errors import UserError
from loka_onnx.operations.compare.difference import (
    SCREEN_COLUMNS,
    SCREEN_LINES,
    Difference,
    Section,
    Side,
    Value,
    lines,
    number,
    page,
    row,
    screen_lines,
    write_difference,
)
from loka_onnx.operations.compare.runs import compare_runs, read_run
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.document import Tone


@pytest.fixture(scope="module")
def old(sample: SampleRun) -> ReportData:
    """FP32 is emitted for the CPU, and an engine that was not run for the RTX."""
    return rich(sample.report)


@pytest.fixture(scope="module")
def new(old: ReportData) -> ReportData:
    """A later run: FP8 for the CPU, another model, other rows, other versions."""
    data = slower(old, 0.9)
    engine = next(e for e in data.engines if e.plan == "fp8-safe" and e.target == "cpu")
    choice = emitting(data, engine.id, "fp8-safe").choice
    renamed = replace(data.modified.sites[2], name="over_arch.last", merged_from=("a", "b"))
    safe, fp32 = data.plans.plan("fp8-safe"), data.plans.plan("fp32")
    unsafe = replace(safe.decisions[0], verdict=Verdict.UNSAFE, reason="KL is now beyond its part")
    merged, *others = data.rewrites["mods"].records
    left_alone = Declined(merged.applied[0].at, "its input has one consumer now")
    declined = replace(merged, applied=(), declined=(*merged.declined, left_alone))
    *splits, last = data.data.splits
    return replace(
        with_plans(data, plans=(fp32, replace(safe, decisions=(unsafe, *safe.decisions[1:])))),
        title="Ranker, day 08",
        modified=replace(data.modified, sites=(*data.modified.sites[:2], renamed)),
        choice=replace(choice, targets=choice.targets[:1]),
        rewrites={"mods": RewriteLog((declined, *others))},
        data=replace(data.data, splits=(*splits, replace(last, digest="e" * 64))),
        versions={**data.versions, "onnxruntime": "1.32.0", "torch": "2.13.0"},
    )


@pytest.fixture
def found(tmp_path: Path, old: ReportData, new: ReportData) -> Difference:
    return compared(tmp_path, old, new)


def test_a_run_against_itself_differs_in_nothing(tmp_path: Path, old: ReportData) -> None:
    directory = write_run(tmp_path / "a", old, seed=1)
    same = compare_runs(directory, directory)
    assert not same.is_different
    assert {section.name for section in same.sections} == {"engines", "cost", "latency", "gain", "data"}
    targets = same.rows("engines")[:2]
    assert [(texts(item)[2], item.tone) for item in targets] == [("the same", Tone.GOOD)] * 2
    assert {texts(item)[2] for item in same.rows("data")} == {"the same"}
    costs = [item.verdict.numbers for item in same.rows("cost") if item.verdict]
    assert costs and set(costs) == {(0.0,)}
    assert {item.verdict.numbers for item in same.rows("latency") if item.verdict} == {(1.0,)}
    assert "Both are the same report" in same.notes
    # An engine that was built anew from the same plan is the same.
    engines = tuple(replace(e, digest="f" * 64, backend_version="9") for e in old.engines)
    again = compared(tmp_path, old, replace(old, engines=engines))
    assert not again.is_different
    assert texts(named(again, "engines", "cpu: SHA-256"))[1] == "f" * 16
    # A report by itself has no settings, and says so.
    other = write_run(tmp_path / "b", old, seed=2)
    assert [item.what for item in compare_runs(directory, other).rows("settings")] == ["seed"]
    alone = compare_runs(directory / "report.json", other)
    assert not alone.rows("settings")
    said = "Settings are not compared: of the old run only its report was given"
    assert any(said in note for note in alone.notes)


def test_another_engine_and_a_target_that_is_gone(found: Difference) -> None:
    assert found.is_different
    cpu, rtx = found.rows("engines")[:2]
    engines = ("cpu-onnxruntime-cpu-fp32 (plan fp32)", "cpu-onnxruntime-cpu-fp8-safe (plan fp8-safe)")
    assert (cpu.what, *texts(cpu)) == ("cpu", *engines, "changed")
    assert (rtx.what, rtx.after, texts(rtx)[2], rtx.tone) == ("rtx", None, "vanished", Tone.BAD)
    shares = named(found, "engines", "cpu: sites in FP8, of the FLOPs")
    assert (shares.before.numbers, shares.after.numbers[0]) == ((0.0, 0.0), 1.0)
    routes = named(found, "engines", "cpu: requests by size")
    assert (routes.before.numbers, routes.after) == ((8.0, 64.0, 512.0), None)


@pytest.mark.parametrize(
    ("bounds", "overlap", "difference"),
    [
        ((0.0002, 0.0004), "intervals overlap", 0.0001),
        ((0.0003, 0.0005), "intervals overlap", 0.0002),
        ((0.0004, 0.0006), "intervals do not overlap", 0.0003),
    ],
)
def test_costs_are_set_side_by_side_and_the_overlap_is_that_of_the_intervals(
    tmp_path: Path, old: ReportData, bounds: tuple[float, float], overlap: str, difference: float
) -> None:
    unrouted = emitting(old, "cpu-onnxruntime-cpu-fp32", "fp32")
    before, after = (
        costing(unrouted, Interval((lower + upper) / 2, lower, upper, 0.95, 2400))
        for lower, upper in ((0.0001, 0.0003), bounds)
    )
    found = compared(tmp_path, before, after)
    costs = [item for item in found.rows("cost") if item.what.startswith("cpu")]
    assert [item.what.split(" · ")[1:3] for item in costs] == [["ctr", "selection"], ["ctr", "certification"]]
    for item in costs:
        assert item.verdict.text.endswith(f"; {overlap}")
        assert item.verdict.numbers == pytest.approx((difference,))
        assert item.before.text.startswith("ΔNE +0.020 % [+0.010 %, +0.030 %]; ")
        assert item.before.numbers[:3] == ((0.0001 + 0.0003) / 2, 0.0001, 0.0003)
    is_worse = overlap == "intervals do not overlap"
    assert (found.rows("engines")[0].tone is Tone.BAD) is is_worse


def test_latencies_have_a_ratio_on_one_device_only(tmp_path: Path, old: ReportData) -> None:
    unrouted = emitting(old, "cpu-onnxruntime-cpu-fp32", "fp32")
    faster = compared(tmp_path / "faster", unrouted, slower(unrouted, 0.8)).rows("latency")
    assert [item.what for item in faster] == [
        "cpu · batch 8 · on the host", "cpu · batch 1,024 · on the device", "cpu · batch 1,024 · on the host"
    ]  # fmt: skip
    assert [item.verdict.numbers[0] for item in faster if item.verdict] == pytest.approx([0.8] * 3)
    times = (faster[0].before.numbers[0], faster[0].after.numbers[0])
    assert times == pytest.approx((81.3471, 0.8 * 81.3471))
    other = with_latencies(unrouted, lambda item: replace(item, counts_for_choice=False))
    for name, after, remark in (
        ("moved", slower(unrouted, 0.8, "NVIDIA H100"), "measured on 'cpu' and on 'NVIDIA H100'"),
        ("other", other, "not measured on the target"),
    ):
        rows = compared(tmp_path / name, unrouted, after).rows("latency")
        assert all(item.verdict is None and item.note.endswith(f"not comparable: {remark}") for item in rows)


def test_gains_over_an_engine_of_the_same_run(tmp_path: Path, old: ReportData) -> None:
    slow = Interval(1.5, 1.45, 1.55, 0.9785, 10)
    losers = tuple(replace(loser, times=slow) for loser in old.choice.targets[0].losers)
    (gain,) = compared(tmp_path, old, with_target(old, losers=losers)).rows("gain")
    assert (gain.what, texts(gain)[2]) == ("cpu · bf16", "intervals do not overlap")
    assert (gain.before.numbers[0], gain.after.numbers) == (1.2537, (1.5, 1.45, 1.55))
    assert gain.note == "the intervals are of different confidence"


def test_sites_have_both_reasons(found: Difference) -> None:
    change = named(found, "sites", "plan fp8-safe · over_arch.fc0")
    assert [text and text.rpartition(", ")[2] for text in texts(change)[:2]] == ["safe", "unsafe"]
    then, now = "KL is far inside the site's part of the budget", "KL is now beyond its part"
    assert change.note == f"then: {then}; now: {now}"
    emitted = named(found, "sites", "emitted for cpu, fp32 → fp8-safe · over_arch.fc0")
    assert [text and text[:4] for text in texts(emitted)[:2]] == ["fp32", "fp8 "]
    gone, came = named(found, "sites", "over_arch.fc2"), named(found, "sites", "over_arch.last")
    assert gone.after is None and came.before is None and came.note == "merged from a, b"


def test_plans_rewrites_data_versions_and_settings(found: Difference) -> None:
    assert named(found, "plans", "fp8-all").after is None
    (rewrite,) = found.rows("rewrites")
    assert rewrite.what == "mods · merge-parallel-linears · over_arch.fc0"
    assert texts(rewrite)[:2] == ("applied", "declined")
    assert rewrite.note.endswith("; now: its input has one consumer now")
    data = {item.what: texts(item)[2] for item in found.rows("data")}
    other = "another file, selection or columns"
    assert data == {"calibration": "the same", "selection": "the same", "certification": other}
    versions, settings = (
        {item.what: texts(item)[:2] for item in found.rows(name)} for name in ("versions", "settings")
    )
    assert versions == {"onnxruntime": ("1.31.1", "1.32.0"), "torch": (None, "2.13.0")}
    assert settings == {
        "budget": ("0.001", None), "calibration.batch_size": ("512", "256"), "mods": (None, '["a"]')
    }  # fmt: skip


def test_every_number_of_the_page_is_in_its_json(found: Difference, tmp_path: Path) -> None:
    files = {path.name: path.read_text() for path in write_difference(found, tmp_path / "out")}
    assert set(files) == {"comparison.json", "comparison.md", "comparison.html"}
    assert serde.loads(Difference, files["comparison.json"]) == found
    facts = json.loads(files["comparison.json"])
    checked = 0
    for cell in tables_of(files["comparison.html"]).cells:
        text = " ".join(cell.text.split())
        if cell.numeric and NUMBER.search(text):
            assert cell.attributes.get("data-source"), text
        if source := cell.attributes.get("data-source"):
            checked += check_numbers(facts, text, source, cell.attributes.get("data-value"))
    assert checked > 60
    flat = " ".join(files["comparison.md"].replace("\\", "").split())
    for section in found.sections:
        for item in section.rows:
            assert all(text in flat for text in (item.what, item.note, *texts(item)) if text)
    assert "SYNTHETIC DATA: numbers of both runs" in flat


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        (None, "there is no such file"),
        ("{", "it is no JSON document"),
        ('{"schema": "loka-onnx/comparison/1", "value": {}}', "its schema is 'loka-onnx/comparison/1'"),
        ('{"schema": "loka-onnx/report/5", "value": {}}', "an older version of loka-onnx"),
        ('{"schema": "loka-onnx/report/99", "value": {}}', "a newer version of loka-onnx"),
        (f'{{"schema": "{schema_id(ReportData)}", "value": {{}}}}', "at title: Field required"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str | None, evidence: str) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as raised:
        read_run(file)
    assert raised.value.where == str(file) and evidence in str(raised.value)
    with pytest.raises(UserError, match=r"it has no 'report\.json'"):
        read_run(tmp_path)


ROWS = (
    row("scale", "1", "2", verdict="worse", tone=Tone.BAD, note="of 3 sites"),
    row("moved", "a", "b"),
    row("gone", "a"),
    row("came", None, "b", note="why"),
    row("alone"),
)


def difference(*sections: Section, path: str = "x", **fields: object) -> Difference:
    sides = Side("A", path, "0" * 64, ("a fact",)), Side("B", "y", "")
    return Difference("T", *sides, sections, is_different=True, **fields)  # type: ignore[arg-type]


def test_a_row_shows_both_sides_the_verdict_and_the_note() -> None:
    found = difference(Section("sites", "Sites of it", ROWS, "Above."), basis="on rows", notes=("look",))
    assert [line.plain for line in lines(found)] == [
        f"A  x, exported model {'0' * 16}",
        "   a fact",
        f"B  y, exported model {numbers.NONE}",
        "on rows",
        "! look",
        "Sites of it",
        "  Above.",
        "  scale: 1 → 2  worse; of 3 sites",
        "  ~ moved: a → b",
        "  - gone: a",
        "  + came: b; why",
        "  alone",
    ]


def test_a_screen_keeps_sides_and_verdicts_whole_and_counts_what_it_leaves_out() -> None:
    many = tuple(row(f"row {place}", "v" * 200) for place in range(100))
    judged = row("judged", "v" * 200, "w" * 200, verdict="worse", note="n" * 200)
    sections = Section("one", "one", many), Section("other", "other", (*many[:3], judged), "A text.")
    found = difference(*sections, path="p" * 200)
    side, *rest = (line.plain for line in screen_lines(found))
    assert "p" * 200 in side
    assert len(rest) < SCREEN_LINES and max(map(len, rest)) <= SCREEN_COLUMNS
    assert "…  worse;" in next(line for line in rest if line.startswith("  judged"))
    shown = sum(line.startswith("  - row") for line in rest) - 3
    assert f"  … and {100 - shown} more" in rest
    assert sum(1 for _ in lines(found)) == 3 + 3 + 104


def test_sections_of_one_name_are_its_tables_and_empty_columns_are_left_out() -> None:
    ratio = number("{:.2f}×".format, 0.8)
    timed = row("p50", number(numbers.latency, 81.25), verdict=ratio, tone=Tone.GOOD)
    assert timed.before == Value("81.2 µs", (81.25,))
    sections = Section("sites", "both", ROWS, "Said once."), Section("sites", "timed", (timed,))
    document = page(difference(*sections, Section("data", "rows", ()), notes=("look",), banner="Beware"))
    compared, notes, sites, data = document.sections
    assert (document.banner, notes.items, sites.paragraphs) == ("Beware", ("look.",), ("Said once.",))
    assert compared.items[0].startswith("A  x")
    assert [[c.title for c in table.columns] for table in sites.tables] == [
        ["Name", "A", "B", "Verdict", "Note"],
        ["Name", "A", "Verdict"],
    ]
    assert [column.numeric for column in sites.tables[1].columns] == [False, True, True]
    _, before, verdict = sites.tables[1].rows[0]
    assert (before.source, before.value) == ("#/value/sections/1/rows/0/before/numbers/0", 81.25)
    assert (verdict.text, verdict.tone) == ("0.80×", Tone.GOOD)
    assert [c.text for c in sites.tables[0].rows[2]] == ["gone", "a", numbers.NONE, "", ""]
    assert data.tables[0].rows == ()
