"""A difference on a terminal and on a page, whatever it is a difference of."""

from __future__ import annotations

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
)
from loka_onnx.report import numbers
from loka_onnx.report.document import Tone

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
