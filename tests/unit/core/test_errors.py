"""Messages stay short, whatever a file puts into them."""

from __future__ import annotations

import pytest

from loka_onnx.errors import MOST_CHARACTERS, UserError, shortened


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
