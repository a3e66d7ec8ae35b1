"""What a page says that a command prints, held against what it prints.

Every line that is shown must be printed, in this order; other lines may be printed in between. `…` stands for
any text. White space counts once. Words and small counts are the same; other numbers may be off by a quarter
or by .05, because a page shows what one machine printed, and others have times and sums of their own. No page
trains: digits of training are not the same on every processor.

Percentages, and the ends of an interval, have no such .05: a loss change is a few hundredths of a percent.
They may be off by a quarter, or by a unit of their last digit and a quarter of the width of the interval that
is shown with them, on their line or the next one. That is about one standard error of a 95 % interval.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"[+\-−]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
INTERVAL = re.compile(r"\[([+\-−]?\d+\.\d+)(?: ?%)?, ([+\-−]?\d+\.\d+)(?: ?%)?\]")
RELATIVE, ABSOLUTE, OF_WIDTH = 0.25, 0.05, 0.25
HALF = re.compile(r"± (\d+(?:\.\d+)?) ?%")
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
    for number, line in enumerate(shown):
        wanted, after = _plain(line), _plain("".join(shown[number + 1 : number + 2]))
        if wanted in ("", ANYTHING):
            continue
        width = _width(wanted) or (_width(after) if after.startswith("[") else 0.0)
        place = next((index for index, found in enumerate(left) if agree(wanted, found, width)), None)
        if place is None:
            missing.append(line)
        else:
            left = left[place + 1 :]
    return missing


def agree(shown: str, printed: str, width: float | None = None) -> bool:
    """Whether a line that is shown stands for one that is printed.

    Args:
        shown: The line of the page.
        printed: The line that a command put out.
        width: Width of the interval that belongs to the line's percentages; None for that in the line itself.
    """
    width = _width(shown) if width is None else width
    # Texts and numbers take turns in what `split` by a pattern with a group returns.
    pieces = re.split(f"({NUMBER.pattern}|{ANYTHING})", shown)
    pattern, wanted, precise = "", [], []
    interval = INTERVAL.search(shown)
    at = 0
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            pattern += re.escape(piece)
        elif piece == ANYTHING:
            pattern += ".*"
        else:
            pattern += f"({NUMBER.pattern})"
            wanted.append(piece)
            is_end = interval is not None and interval.start() < at < interval.end()
            precise.append(is_end or pieces[index + 1].lstrip().startswith("%"))
        at += len(piece)
    match = re.fullmatch(pattern, printed)
    if match is None:
        return False
    return all(
        _is_near(one, other, _last_digit(one) + OF_WIDTH * width if is_precise else ABSOLUTE)
        for one, other, is_precise in zip(wanted, match.groups(), precise, strict=True)
    )


def _plain(line: str) -> str:
    return " ".join(line.split())


def _width(line: str) -> float:
    """Width of the first interval of a line; 0 where there is none."""
    found = INTERVAL.search(line)
    if found is None:
        half = HALF.search(line)
        return 2 * _value(half[1]) if half else 0.0
    return _value(found[2]) - _value(found[1])


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def _last_digit(text: str) -> float:
    """What a unit of the last digit is worth."""
    mantissa, _, exponent = text.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _is_near(shown: str, printed: str, allowance: float) -> bool:
    if shown == printed:
        return True
    one, other = _value(shown), _value(printed)
    if shown.lstrip("+-−").isdigit() and abs(one) <= LARGEST_COUNT:
        return False
    return abs(one - other) <= max(RELATIVE * abs(one), allowance) + 1e-12
