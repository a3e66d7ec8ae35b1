"""Numbers as text, the same in Markdown, HTML and the terminal."""

from __future__ import annotations

import math

from loka_onnx.core.intervals import Interval

NOT_MEASURED = "not measured"
NOT_KNOWN = "not known"
NONE = "–"

_MAX_DECIMALS = 8


def signed_percent(value: float, decimals: int) -> str:
    """A relative change, ``+0.0123 %``; what rounds to zero is ``0 %``."""
    if not math.isfinite(value):
        return f"{value}"
    text = f"{100 * value:+.{decimals}f}"
    return f"{'0' if float(text) == 0 else text} %"


def percent_interval(interval: Interval, budget: float | None = None) -> str:
    """A relative change with its interval, ``+0.0123 % [-0.0010 %, +0.0256 %]``.

    Two significant digits of the half-width are shown, and more where rounding would move an end across the
    budget, or onto it.
    """
    decimals = interval_decimals(interval, budget)
    value, lower, upper = (
        signed_percent(v, decimals) for v in (interval.value, interval.lower, interval.upper)
    )
    return f"{value} [{lower}, {upper}]"


def half_width(interval: Interval) -> float:
    """Return the larger distance of an end from the value."""
    return max(interval.upper - interval.value, interval.value - interval.lower)


def is_symmetric(interval: Interval) -> bool:
    """Return whether both ends are about as far from the value."""
    above, below = interval.upper - interval.value, interval.value - interval.lower
    return math.isfinite(above + below) and abs(above - below) <= 0.1 * max(above, below)


def plus_minus(interval: Interval, budget: float | None = None) -> str:
    """A symmetric interval, ``+0.003 % ± 0.004 %`` or ``0 %``, on its side of the budget."""
    decimals, half = interval_decimals(interval, budget), half_width(interval)
    if budget is not None:
        limit, upper = 100 * budget, 100 * interval.upper
        while decimals < _MAX_DECIMALS and _side(
            round(100 * interval.value, decimals) + round(100 * half, decimals), limit
        ) != _side(upper, limit):
            decimals += 1
    value, width = signed_percent(interval.value, decimals), signed_percent(half, decimals).lstrip("+")
    return value if value == width == "0 %" else f"{value} ± {width}"


def interval_decimals(interval: Interval, budget: float | None = None) -> int:
    """Return the decimals, 2 to 8, for an interval in percent: two significant digits of its half-width, at
    most those of a hundredth of the budget, and more where rounding moves an end to the budget or across.
    """
    ends = (interval.lower, interval.upper)
    width = 100 * half_width(interval)
    if not all(math.isfinite(v) for v in (*ends, interval.value)):
        return 2
    scale = width if width > 0 else abs(100 * interval.value)
    decimals = 2 if scale == 0 else min(max(1 - math.floor(math.log10(scale)), 2), _MAX_DECIMALS)
    if budget is not None and 0 < budget < math.inf:
        decimals = min(decimals, max(2 - math.floor(math.log10(100 * budget)), 2))
    while budget is not None and decimals < _MAX_DECIMALS and not _keeps_sides(ends, budget, decimals):
        decimals += 1
    return decimals


def _keeps_sides(ends: tuple[float, float], budget: float, decimals: int) -> bool:
    """Return whether rounded ends stay on their side of the unrounded budget."""
    limit = 100 * budget
    return all(_side(round(100 * end, decimals), limit) == _side(100 * end, limit) for end in ends)


def _side(value: float, limit: float) -> int:
    # A percentage and its fraction differ in the last bits.
    return 0 if math.isclose(value, limit, rel_tol=1e-9) else (value > limit) - (value < limit)


def budget_percent(value: float) -> str:
    """A budget as written in the run file, ``0.02 %``."""
    return f"{100 * value:.6g} %"


def share(value: float) -> str:
    """A share of a whole, ``63.2 %``."""
    return f"{100 * value:.1f} %"


def error_percent(value: float) -> str:
    """A relative error without sign, to three digits, ``2.31 %``."""
    return f"{100 * value:.3g} %"


def metric_interval(interval: Interval) -> str:
    """A change of AUC or of the prediction ratio: six decimals; what rounds to zero is 0."""
    texts = (f"{end:+.6f}" for end in (interval.value, interval.lower, interval.upper))
    value, lower, upper = ("0" if float(text) == 0 else text for text in texts)
    return f"{value} [{lower}, {upper}]"


metric = "{:.5f}".format
"""Normalized entropy, AUC, loss."""
ratio = "{:.4f}".format
"""Prediction ratio."""
scientific = "{:.3g}".format
"""An absolute difference, ``1.2e-06``."""
count = "{:,}".format
"""A number of things, ``12,345``."""


def size(value: int) -> str:
    """A file size, ``12.3 MiB``."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def latency(value_us: float) -> str:
    """A latency, ``123.4 µs`` or ``12.34 ms``."""
    return f"{value_us:.1f} µs" if value_us < 10_000 else f"{value_us / 1000:.2f} ms"


def seconds(value: float) -> str:
    """A wall time, ``12.3 s``."""
    return f"{value:.1f} s" if value >= 0.1 or value == 0 else f"{1000 * value:.1f} ms"


def digest(value: str) -> str:
    """The first characters of a digest; the whole is in report.json."""
    return value[:16] if value else NONE
