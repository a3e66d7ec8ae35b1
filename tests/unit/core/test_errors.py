"""Messages stay short, whatever a file puts into them; errors have codes, and their wording is reviewed."""

import sys
from pathlib import Path

import pytest

from loka_onnx.errors import MOST_CHARACTERS, DataError, UserError, nearest, shortened

sys.path.insert(0, str(Path(__file__).parents[2]))

import wording


def test_a_short_text_stays() -> None:
    text = "x" * MOST_CHARACTERS
    assert shortened(text) is text


@pytest.mark.parametrize("more", [1, 7, 10_000_000])
def test_a_long_text_keeps_its_ends_and_says_how_much_is_gone(more: int) -> None:
    text = "begin" + "-" * (MOST_CHARACTERS + more - 8) + "end"
    found = shortened(text)
    head, gone, tail = found.split(" … ")
    assert text.startswith(head) and text.endswith(tail)
    assert len(head) + len(tail) == MOST_CHARACTERS
    # Two thirds are the beginning, which says what and where.
    assert len(head) == 2 * len(tail)
    assert int(gone.split()[0]) == more
    assert str(UserError(text)) == found


@pytest.mark.parametrize(("word", "found"), [("h100", "'nvidia-h100'"), ("gpus", "'gpu'"), ("migraphx", "")])
def test_one_known_word_is_near_or_none(word: str, found: str) -> None:
    suggestion = nearest(word, ["cpu", "gpu", "nvidia-h100", "h10"])
    assert found in suggestion and bool(suggestion) == bool(found)


def test_a_code_is_no_part_of_the_sentence() -> None:
    error = DataError("E0214 column 'a' holds NaN", where="rows.parquet")
    assert (error.code, error.what, str(error)) == (
        "E0214",
        "column 'a' holds NaN",
        "rows.parquet: column 'a' holds NaN",
    )
    assert DataError("E12 is no code").code == ""


def test_every_place_has_a_code_and_wording_is_that_of_the_snapshots() -> None:
    assert wording.repeated() == []
    # ``python tests/wording.py`` writes them again.
    stored = {path.stem: path.read_text(encoding="utf-8") for path in wording.SNAPSHOTS.glob("*.txt")}
    assert wording.snapshots() == stored
