"""Interactive parts of the page: charts, quadrants and histograms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loka_onnx.report.chart import Chart, charts
from loka_onnx.report.data import ReportData
from loka_onnx.report.histograms import histogram_data
from loka_onnx.report.provenance import Pointers, located
from loka_onnx.report.site_tables import shown_plan
from loka_onnx.report.speed_tables import Quadrants, quadrants


@dataclass(frozen=True)
class Exhibits:
    """The drawn parts of the page, none by default; `histograms` is `histograms.histogram_data`."""

    charts: tuple[Chart, ...] = ()
    quadrants: tuple[Quadrants, ...] = ()
    histograms: dict[str, Any] = field(default_factory=dict)

    @property
    def has_drawings(self) -> bool:
        """True if anything on the page needs plotly.js."""
        return any(chart.figure for chart in self.charts) or bool(self.histograms.get("tensors"))

    @property
    def sites(self) -> frozenset[str]:
        """Names of the sites that the page can show."""
        return frozenset(site["name"] for site in self.histograms.get("sites", ()))


def exhibits(data: ReportData, pointers: Pointers) -> Exhibits:
    """Return everything drawn, for the run of `pointers`."""
    return Exhibits(charts(data), located(quadrants(data), pointers), histogram_data(data, shown_plan(data)))
