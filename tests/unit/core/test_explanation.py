"""A log of rewrites, told site by site."""

from __future__ import annotations

from loka_onnx.core.explanation import Explanation, Line, Mark, explain
from loka_onnx.core.rewrite import Applied, Declined, RewriteLog, RewriteRecord
from loka_onnx.core.site import Operand, Site, SiteKind


def site(name: str, reads: str, writes: str, merged_from: tuple[str, ...] = ()) -> Site:
    operands = (Operand(reads, 0, False, 1, (None, 8)), Operand(f"{name}.weight", 1, True, 0, (8, 8)))
    return Site(name, SiteKind.LINEAR, "MatMul", operands, writes, 8, 8, 1, merged_from)


BEFORE = (
    site("mmoe.gate0", "x", "g0"),
    site("mmoe.gate1", "x", "g1"),
    site("dots.matmul", "t", "d"),
    site("over.fc1", "d", "h"),
    site("twin", "x", "g2"),
)
AFTER = (
    site("mmoe.gate0+gate1", "x", "g", ("mmoe.gate0", "mmoe.gate1")),
    site("dots.matmul", "t", "d"),
    site("over.fc1", "d", "h"),
)


def told(*records: RewriteRecord) -> Explanation:
    return explain(RewriteLog(records), BEFORE, AFTER)


def lines(explanation: Explanation, name: str) -> list[tuple[str, Mark, str]]:
    (story,) = (story for story in explanation.sites if story.site == name)
    return [(line.transform, line.mark, line.at) for line in story.lines]


def where(entry: Applied | Declined) -> set[str]:
    """The sites that one entry is told for."""
    is_applied = isinstance(entry, Applied)
    record = RewriteRecord("mod", (entry,) if is_applied else (), () if is_applied else (entry,))
    explanation = told(record)
    found = {story.site for story in explanation.sites if story.lines}
    assert bool(explanation.elsewhere) is not bool(found)
    return found


def test_every_site_has_its_story_the_gone_ones_last() -> None:
    assert [(s.site, s.became, s.is_gone) for s in told().sites] == [
        ("mmoe.gate0+gate1", (), False),
        ("dots.matmul", (), False),
        ("over.fc1", (), False),
        ("mmoe.gate0", ("mmoe.gate0+gate1",), True),
        ("mmoe.gate1", ("mmoe.gate0+gate1",), True),
        ("twin", (), True),
    ]


def test_a_merge_is_told_for_the_new_site_and_for_those_it_replaces() -> None:
    merged = "mmoe.gate0+gate1"
    entry = Applied(merged, "2 linears → one", {merged: ("mmoe.gate0", "mmoe.gate1")})
    assert where(entry) == {merged, "mmoe.gate0", "mmoe.gate1"}


def test_a_name_stands_for_the_sites_around_it() -> None:
    assert where(Declined("over.fc1", "K is odd")) == {"over.fc1"}
    assert where(Declined("over.fc1/relu", "not alone")) == {"over.fc1"}
    assert where(Applied("dots/gather", "gone")) == {"dots.matmul"}
    assert where(Declined("h", "it leaves the graph")) == {"over.fc1"}
    assert where(Declined("d", "two read it")) == {"dots.matmul", "over.fc1"}
    assert where(Applied("over.fc1", "a position of 'dots/gather' is gathered again")) == {
        "over.fc1",
        "dots.matmul",
    }


def test_look_alikes_of_a_name_are_elsewhere() -> None:
    for name in ("/concat", "over", "over.fc10", "over.fc1x/relu", "mmoe/concat2/inner", "unknown"):
        assert where(Declined(name, "over.fc1 without quotes is prose")) == set(), name


def test_entries_keep_the_order_of_the_mods_and_their_marks() -> None:
    explanation = told(
        RewriteRecord("one", (), (Declined("over.fc1", "not yet"),)),
        RewriteRecord("two", (Applied("over.fc1", "padded"),), (Declined("/concat", "odd"),)),
    )
    assert lines(explanation, "over.fc1") == [
        ("one", Mark.DECLINED, "over.fc1"),
        ("two", Mark.APPLIED, "over.fc1"),
    ]
    assert explanation.elsewhere == (Line("two", Mark.DECLINED, "/concat", "odd"),)


def test_an_entry_that_names_a_site_twice_is_told_once() -> None:
    explanation = told(RewriteRecord("mod", (Applied("over.fc1", "'over.fc1' and 'h'"),), ()))
    assert len(lines(explanation, "over.fc1")) == 1


def test_what_was_rolled_back_says_by_how_much() -> None:
    """In both forms of a record: emptied by the sequence, and with what had been applied."""
    reason = "rolled back on the check rows: moved output 'h' by 0.25, tolerance 1e-05"
    emptied = RewriteRecord("mod", (), (Declined("twin", reason),), 0.25, 1e-5, rolled_back=True)
    kept = RewriteRecord("mod", (Applied("twin", "merged"),), (), 0.25, 1e-5, rolled_back=True)
    (first,), (second,) = (told(r).sites[-1].lines for r in (emptied, kept))
    assert first == Line("mod", Mark.ROLLED_BACK, "twin", reason)
    assert second.mark is Mark.ROLLED_BACK
    assert second.text == "merged; rolled back: moved an output by 0.25, tolerance 1e-05"


def test_the_output_that_a_rollback_names_is_no_place() -> None:
    reason = "rolled back on the check rows: moved output 'h' by 0.25, tolerance 1e-05"
    record = RewriteRecord("mod", (), (Declined("twin", reason),), 0.25, 1e-5, rolled_back=True)
    assert lines(told(record), "over.fc1") == []


def test_what_a_mod_declined_by_itself_is_not_called_rolled_back() -> None:
    entries = (Declined("twin", "rolled back on the check rows: moved"), Declined("over.fc1", "K is odd"))
    record = RewriteRecord("mod", (), entries, 1.0, 0.1, rolled_back=True)
    assert lines(told(record), "over.fc1") == [("mod", Mark.DECLINED, "over.fc1")]
