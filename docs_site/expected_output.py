"""What a page says that a command prints, held against what it prints.

Every line that is shown must be printed, in this order; other lines may be printed in between. `…` stands for
any text. White space counts once. Words and small counts are the same; other numbers may be off by a quarter
or by .05, because a page shows what one machine printed and training differs from machine to machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"[+\-−]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
RELATIVE, ABSOLUTE = 0.25, 0.05
LARGEST_COUNT = 99
ANYTHING = "…"


def missing_lines(shown: Sequence[str], printed: str) -> list[str]:
    """The lines that are shown and not printed behind those before them.

    Args:
        shown: Lines of a page.
        printed: What the command put out.
    """
    left = [_plain(line) for line in printed.splitlines()]
    missing = []
    for line in shown:
        wanted = _plain(line)
        if wanted in ("", ANYTHING):
            continue
        place = next((index for index, found in enumerate(left) if agree(wanted, found)), None)
        if place is None:
            missing.append(line)
        else:
            left = left[place + 1 :]
    return missing


def agree(shown: str, printed: str) -> bool:
    """Whether a line that is shown stands for one that is printed."""
    # Texts and numbers take turns in what `split` by a pattern with a group returns.
    pieces = re.split(f"({NUMBER.pattern}|{ANYTHING})", shown)
    pattern, wanted = "", []
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            pattern += re.escape(piece)
        elif piece == ANYTHING:
            pattern += ".*"
        else:
            pattern += f"({NUMBER.pattern})"
            wanted.append(piece)
    match = re.fullmatch(pattern, printed)
    if match is None:
        return False
    return all(_is_near(one, other) for one, other in zip(wanted, match.groups(), strict=True))


def _plain(line: str) -> str:
    return " ".join(line.split())


def _is_near(shown: str, printed: str) -> bool:
    if shown == printed:
        return True
    one, other = (float(text.replace(",", "").replace("−", "-")) for text in (shown, printed))
    if shown.lstrip("+-−").isdigit() and abs(one) <= LARGEST_COUNT:
        return False
    return abs(one - other) <= max(RELATIVE * abs(one), ABSOLUTE)
