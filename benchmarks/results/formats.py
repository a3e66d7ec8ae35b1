"""Numbers as text, tables, and charts of HTML that need no script.

Charts are rows of boxes placed in percent of their track, so that their text keeps its size on a phone and
follows the colours of the theme.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"
DIGITS = 3
MINUS = "−"
FIXED = "\u00a0"
"""A space that no line breaks at."""


def number(value: Any, digits: int = DIGITS) -> str:
    """A number to so many significant digits, or whole with separators; other values as they are."""
    if value is None or isinstance(value, bool):
        return {None: NOTHING, True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}".replace("-", MINUS)
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if not value:
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    text = f"{value:.{digits - 1}e}" if magnitude < -6 else f"{value:,.{max(digits - 1 - magnitude, 0)}f}"
    return text.replace("-", MINUS) if magnitude >= -6 else text


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return NOTHING if share is None else f"{number(share * 100)}{FIXED}%"


def times(ratio: float | None) -> str:
    """A ratio."""
    return NOTHING if ratio is None else f"{number(ratio)}×"


def microseconds(value: float | None) -> str:
    """A time in µs."""
    return NOTHING if value is None else f"{number(value, DIGITS + 1)}{FIXED}µs"


def signed(value: float, decimals: int) -> str:
    """A change."""
    return f"{value:+.{decimals}f}".replace("-", MINUS)


def interval(estimate: Sequence[float] | None, unit: str = f"{FIXED}%") -> str:
    """An estimate with its interval, to two digits of the interval's width.

    Args:
        estimate: Estimate, lower and upper end.
        unit: Behind the estimate.
    """
    if estimate is None:
        return NOTHING
    middle, low, high = estimate
    decimals = decimals_of(high - low)
    return f"{signed(middle, decimals)}{unit} [{signed(low, decimals)},{FIXED}{signed(high, decimals)}]"


def decimals_of(width: float) -> int:
    """Decimals that two digits of a width need."""
    # Also where the width is not a number.
    return DIGITS if not width > 0 else min(max(1 - math.floor(math.log10(width)), 0), 2 * DIGITS)


def spread(value: Mapping[str, float], unit: str = "") -> str:
    """A median with its smallest and largest."""
    return f"{number(value['median'])}{unit} ({_range(value['min'], value['max'])})"


def quartiles(value: Mapping[str, float]) -> str:
    """A median in µs with its quartiles."""
    low, high = quartile_ends(value)
    return f"{number(value['median_us'], DIGITS + 1)} ({_range(low, high, DIGITS + 1)})"


def quartile_ends(value: Mapping[str, float]) -> tuple[float, float]:
    """Lower and upper quartile of a time, µs, by either name that records give them."""
    low = value["low_us"] if "low_us" in value else value["quartile_low_us"]
    return low, value["high_us"] if "high_us" in value else value["quartile_high_us"]


def _range(low: float | None, high: float | None, digits: int = DIGITS) -> str:
    return f"{number(low, digits)}{FIXED}to{FIXED}{number(high, digits)}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, texts: int = 1, notes: int = 0) -> str:
    """A table.

    Args:
        head: Titles.
        rows: As many values as titles each.
        texts: First columns that are texts; the others are aligned to the right.
        notes: Last columns that are texts.
    """
    last = len(head) - notes
    titles = "| " + " | ".join(head) + " |"
    lines = [
        titles,
        "|" + "|".join("---" if i < texts or i >= last else "---:" for i in range(len(head))) + "|",
    ]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} cells under {len(head)} titles: {row}")
        lines.append(_line([value if isinstance(value, str) else number(value) for value in row]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return (
        "| "
        + " | ".join(re.sub(r"[ \n]+", " ", cell.strip()).replace("|", "\\|") or NOTHING for cell in cells)
        + " |"
    )


@dataclass(frozen=True)
class Bar:
    """One row of a chart.

    Attributes:
        label: What it is.
        value: Its length.
        text: The value, written out.
        ends: Lower and upper end of its interval or its spread, if it has one.
        is_chosen: Whether it stands out.
    """

    label: str
    value: float
    text: str
    ends: tuple[float, float] | None = None
    is_chosen: bool = False


def chart(title: str, bars: Sequence[Bar], *, mark: float | None = None, longest: float | None = None) -> str:
    """Bars from zero, with their intervals.

    Args:
        title: What the lengths are; also what a screen reader is told.
        bars: At least one.
        mark: Where a line is drawn through all rows: a budget, or 1.
        longest: Where the axis is cut; bars beyond it end in an arrow.
    """
    reach = [value for bar in bars for value in (bar.value, *(bar.ends or ()))]
    high = max([*reach, mark or 0.0, 0.0])
    high = min(high, longest) if longest is not None else high
    low = min([*reach, 0.0])
    low = max(low, -high) if longest is not None else low
    width = (high - low) or 1.0

    def at(value: float) -> float:
        return round(100 * (min(max(value, low), high) - low) / width, 2)

    rows = []
    for bar in bars:
        start, end = sorted((at(0.0), at(bar.value)))
        boxes = [f'<span class="bar" style="left:{start}%;width:{round(end - start, 2)}%"></span>']
        if bar.ends is not None:
            left, right = at(bar.ends[0]), at(bar.ends[1])
            boxes.append(f'<span class="ends" style="left:{left}%;width:{round(right - left, 2)}%"></span>')
        if mark is not None:
            boxes.append(f'<span class="mark" style="left:{at(mark)}%"></span>')
        beyond = " beyond" if longest is not None and bar.value > longest else ""
        chosen = " chosen" if bar.is_chosen else ""
        rows.append(
            f'<div class="row{chosen}{beyond}"><span class="label">{html.escape(bar.label)}</span>'
            f'<span class="track">{"".join(boxes)}</span>'
            f'<span class="value">{html.escape(bar.text)}</span></div>'
        )
    caption = html.escape(title)
    return f'<div class="chart" role="group" aria-label="{caption}">\n<p>{caption}</p>\n' + (
        "\n".join(rows) + "\n</div>\n"
    )
