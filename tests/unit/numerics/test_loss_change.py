"""Sums of columns, and the parts of a loss change, against float64 and fractions."""

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.errors import InternalError
from loka_onnx.numerics.column_sums import ROWS_HELD, ColumnSums
from loka_onnx.numerics.loss_change import SERIES_BELOW, kl_rows, labelled_rows, loss_change
from loka_onnx.numerics.task_metrics import log_loss_rows, squared_error_rows

# The largest error seen on 20,000 random pairs was 6.1e-14, at |δ| just below SERIES_BELOW.
KL_RELATIVE = 3e-13

LOGIT = st.floats(-40, 40)
DELTA = st.floats(-30, 30) | st.floats(-0.02, 0.02) | st.floats(-1e-8, 1e-8)


def exact_kl(z: float, z_prime: float) -> mpmath.mpf:
    def softplus(v):
        return mpmath.log1p(mpmath.exp(v))

    z, z_prime = mpmath.mpf(z), mpmath.mpf(z_prime)
    p = 1 / (1 + mpmath.exp(-z))
    return p * (softplus(-z_prime) - softplus(-z)) + (1 - p) * (softplus(z_prime) - softplus(z))


@given(z=LOGIT, delta=DELTA)
@example(z=3.0, delta=0.0)
@example(z=0.0, delta=1e-5)
@example(z=8.0, delta=1e-9)
@example(z=39.0, delta=1e-12)
@example(z=2.0, delta=SERIES_BELOW)
@example(z=-2.0, delta=1.0)
@settings(max_examples=400, deadline=None)
def test_kl_keeps_its_relative_precision(z, delta):
    z_prime = z + delta
    with mpmath.workdps(100):
        expected = float(exact_kl(z, z_prime))
    got = kl_rows(np.array([z]), np.array([z_prime]))[0]
    assert got == pytest.approx(expected, rel=KL_RELATIVE, abs=1e-60)


@pytest.mark.parametrize(
    ("z", "z_prime", "expected"),
    [(-800.0, 800.0, 800.0), (800.0, -800.0, 800.0), (0.0, 2000.0, 1000.0 - np.log(2)), (900.0, 900.5, 0.0)],
)
def test_extreme_logits_do_not_overflow(z, z_prime, expected):
    assert kl_rows(np.array([z]), np.array([z_prime]))[0] == pytest.approx(expected, rel=1e-14)


@given(z=LOGIT, delta=st.floats(-30, 30), y=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_the_parts_add_up_to_the_loss_change(z, delta, y):
    a, b, label = np.array([z]), np.array([z + delta]), np.array([y])
    change = loss_change(OutputKind.LOGIT, a, b, label)
    direct = log_loss_rows(b, label) - log_loss_rows(a, label)
    # The direct difference of two losses of up to 70 nats is itself rounded.
    assert change.total[0] == pytest.approx(direct[0], abs=1e-13)
    assert change.kl[0] >= 0.0


def test_residuals_and_differences_of_fp32_are_kept():
    got = labelled_rows(np.array([50.0, -50.0]), np.array([51.0, -49.0]), np.array([1.0, 0.0]))
    np.testing.assert_allclose(got, [-np.exp(-50.0), np.exp(-50.0)], rtol=1e-12)
    z = np.array([10.0], np.float32)
    z_prime = np.nextafter(z, np.float32(11))
    delta = float(z_prime[0]) - 10.0
    p = 1 / (1 + np.exp(-10.0))
    assert kl_rows(z, z_prime)[0] == pytest.approx(0.5 * p * (1 - p) * delta**2, rel=1e-5)


@given(f=st.floats(-100, 100), delta=st.floats(-10, 10), y=st.floats(-100, 100))
@settings(max_examples=100, deadline=None)
def test_squared_error_parts_add_up(f, delta, y):
    a, b, label = np.array([f]), np.array([f + delta]), np.array([y])
    change = loss_change(OutputKind.REGRESSION, a, b, label)
    direct = squared_error_rows(b, label) - squared_error_rows(a, label)
    assert change.total[0] == pytest.approx(direct[0], abs=1e-10)
    # A power of a scalar and a square of an array may differ in the last bit.
    assert change.kl[0] == pytest.approx((b[0] - a[0]) ** 2, rel=1e-15, abs=0)


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
