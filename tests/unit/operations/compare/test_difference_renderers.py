"""A difference on a terminal and on a page, whatever it is a difference of."""

from __future__ import annotations

from loka_onnx.operations.compare.difference import (
    SCREEN_COLUMNS,
    SCREEN_LINES,
    Difference,
    Row,
    Subject,
    lines,
    page,
    screen_lines,
)
from loka_onnx.report import numbers
from loka_onnx.report.document import Tone, Verdict, cell

ROWS = (
    Row("scale", "1", "2", cell("worse", Tone.BAD), "of 3 sites", "~ "),
    Row("gone", before="a"),
    Row("came", after="b"),
    Row("alone"),
)


def texts(found: Difference) -> list[str]:
    return [line.plain for line in lines(found)]


def test_a_row_shows_both_sides_the_judgement_and_the_remark() -> None:
    found = Difference("T", ("A  x", "B  y"), (Subject("sites", ROWS),), ("look",))
    assert texts(found) == [
        "A  x",
        "B  y",
        "! look",
        "sites",
        "  ~ scale: 1 → 2  worse; of 3 sites",
        "  gone: a",
        "  came: b",
        "  alone",
    ]
    aligned = Difference("T", (), (Subject("sites", ROWS[1:], width=6),))
    assert texts(aligned) == ["sites", "  gone  a", "  came  b", "  alone"]


def test_verdicts_stand_in_place_of_rows() -> None:
    verdict = Verdict("cpu", "cpu: faster", ("a fact",), Tone.GOOD)
    found = Difference("T", (), (Subject("sites", ROWS),), verdicts=(verdict,))
    assert texts(found) == ["cpu: faster", "  a fact"]


def test_a_screen_keeps_sides_whole_and_counts_what_it_leaves_out() -> None:
    path = "p" * 200
    many = tuple(Row(f"row {place}", after="v" * 200) for place in range(100))
    found = Difference("T", (path,), (Subject("one", many), Subject("other", many[:3])))
    side, *rest = (line.plain for line in screen_lines(found))
    assert side == path
    assert len(rest) < SCREEN_LINES and max(map(len, rest)) == SCREEN_COLUMNS
    shown = sum(line.startswith("  row") for line in rest) - 3
    assert f"  … and {100 - shown} more (--all)" in rest
    assert len(texts(found)) == 1 + 2 + 103


def test_subjects_of_one_section_are_its_tables_and_empty_columns_are_left_out() -> None:
    first = Subject("with both", ROWS, "Engines, all", text=("Said once.",))
    second = Subject("bare", ROWS[1:], "Engines, all", ("Site", "Then", "Now", "Verdict"), numeric=True)
    document = page(
        Difference("T", (), (first, second, Subject("", (), "Data", text=("None.",))), ("look",)), {}
    )
    notes, engines, data = document.sections
    assert notes.items == ("look.",)
    assert (engines.anchor, engines.title, engines.paragraphs) == ("engines", "Engines, all", ("Said once.",))
    assert [[c.title for c in table.columns] for table in engines.tables] == [
        ["Name", "Old", "New", "Change", "Remark"],
        ["Site", "Then", "Now"],
    ]
    assert [column.numeric for column in engines.tables[1].columns] == [False, True, True]
    assert [c.text for c in engines.tables[1].rows[0]] == ["gone", "a", numbers.NONE]
    assert (data.tables, data.paragraphs) == ((), ("None.",))
