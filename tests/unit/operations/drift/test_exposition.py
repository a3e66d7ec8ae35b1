"""The text format of Prometheus, read back by its own client's parser."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from loka_onnx.operations.drift.exposition import Family, Kind, exposition

TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
)


@given(TEXT, TEXT, st.floats())
@example('say "no"\\', "a\nb\\n{}", math.nan)
@example("cross.0.linear", "/over/MatMul", -math.inf)
@example("", "", 2.0**53)
def test_labels_help_and_values_survive(label: str, text: str, value: float) -> None:
    family = Family("loka_onnx_site_saturated_share", Kind.GAUGE, text)
    family.add(value, site=label, other="x")
    (read,) = text_string_to_metric_families(exposition([family]))
    assert (read.name, read.type) == ("loka_onnx_site_saturated_share", "gauge")
    (sample,) = read.samples
    assert sample.labels == {"site": label, "other": "x"}
    assert sample.value == pytest.approx(value, rel=1e-15, nan_ok=True)


def test_the_text_of_two_families() -> None:
    rows, share = Family("rows_total", Kind.COUNTER, "Rows."), Family("share", Kind.GAUGE, 'A "share".')
    rows.add(3)
    share.add(0.25, site="a")
    share.add(math.inf, site='b"\\\n')
    assert exposition([rows, share, Family("nothing", Kind.GAUGE, "Never seen.")]) == (
        "# HELP rows_total Rows.\n"
        "# TYPE rows_total counter\n"
        "rows_total 3\n"
        '# HELP share A "share".\n'
        "# TYPE share gauge\n"
        'share{site="a"} 0.25\n'
        'share{site="b\\"\\\\\\n"} +Inf\n'
    )
