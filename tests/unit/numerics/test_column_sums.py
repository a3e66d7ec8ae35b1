"""Exact sums of columns against `core.exact_sum`, which is held against rational arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.errors import InternalError
from loka_onnx.numerics.column_sums import ROWS_HELD, ColumnSums

wild = st.one_of(st.just(0.0), st.floats(-1e300, 1e300), st.floats(-1.0, 1.0), st.just(5e-324))


def sums_of(table: np.ndarray) -> tuple[ExactSum, ...]:
    sums = ColumnSums()
    for row in table:
        sums.add(row)
    return sums.sums()


def expected(table: np.ndarray) -> tuple[ExactSum, ...]:
    return tuple(ExactSum.of(column) for column in table.T)


@given(arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(0, 5)), elements=wild))
def test_every_column_is_summed_exactly(table):
    assert sums_of(table) == expected(table)


def test_more_rows_than_are_held_and_all_magnitudes():
    """Sixty decades within a column: heads and rests of three rounds and more."""
    random = np.random.default_rng(0)
    shape = (2 * ROWS_HELD + 17, 12)
    table = random.standard_normal(shape) * 10.0 ** random.integers(-30, 30, shape)
    table[random.random(shape) < 0.3] = 0.0
    table[:, 3] = 0.0
    table[:, 4] = [(-1.0) ** row for row in range(len(table))]
    assert sums_of(table) == expected(table)
    assert sums_of(table)[3] == ExactSum() and sums_of(table)[4] == ExactSum.of([1.0])


def test_sums_can_be_read_between_rows_that_their_owner_uses_again():
    table = np.random.default_rng(1).standard_normal((9, 3))
    sums = ColumnSums()
    for number, row in enumerate(table, 1):
        sums.add(row)
        assert sums.sums() == expected(table[:number])
    sums, row = ColumnSums(), np.ones(1)
    sums.add(row)
    row[0] = 5.0
    assert sums.sums()[0].value == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.7e308])
def test_what_has_no_exact_sum_is_refused(value):
    sums = ColumnSums()
    sums.add(np.array([1.0, value]))
    sums.add(np.array([1.0, value]))
    with pytest.raises(InternalError, match="exact sums take finite numbers"):
        sums.sums()
