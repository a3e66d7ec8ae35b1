"""Array distances against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loka_onnx.errors import InternalError
from loka_onnx.numerics.error_metrics import cosine, relative_error, sqnr_db


def test_known_values():
    exact, approximate = np.array([[3.0], [4.0]]), np.array([[3.0], [4.5]])
    assert relative_error(exact, approximate) == pytest.approx(0.1)
    assert sqnr_db(exact, approximate) == pytest.approx(20.0)
    assert cosine(exact, approximate) == pytest.approx(27 / 5 / math.sqrt(9 + 4.5**2))


def test_sqnr_of_uniform_rounding_is_six_decibels_a_bit():
    x = np.random.default_rng(16).uniform(-1, 1, 100_000)
    assert sqnr_db(x, np.round(x * 128) / 128) == pytest.approx(20 * math.log10(2) * 8, abs=0.1)


def test_zeros():
    zero, one = np.zeros(2), np.ones(2)
    assert (relative_error(zero, zero), sqnr_db(one, one), cosine(zero, zero)) == (0.0, math.inf, 1.0)
    assert (relative_error(zero, one), sqnr_db(zero, one), cosine(zero, one)) == (math.inf, -math.inf, 0.0)


def test_float32_arrays_are_compared_in_float64():
    x = np.full(4, 1e30, np.float32)
    assert relative_error(x, -x) == 2.0


def test_shapes_must_agree():
    with pytest.raises(InternalError, match="arrays of different shapes are compared"):
        relative_error(np.ones(2), np.ones((2, 1)))
