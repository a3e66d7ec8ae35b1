"""The error of a product of rounded operands against the formula, written out with ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from loka_onnx.core.formats import E5M2
from loka_onnx.core.recipe import Granularity
from loka_onnx.numerics.product_error import Product, Rounding

RANDOM = np.random.default_rng(0)
K, N, M = 24, 20, 200
X = RANDOM.normal(size=(M, K)) * np.linspace(0.1, 3, K)
W = RANDOM.normal(size=(K, N))
AMAX = np.abs(X).max(axis=0) * 1.5
ALL = np.arange(N)
ONES = np.ones(K), np.ones(N)
PER_TENSOR = Rounding(weights=(Granularity.PER_TENSOR,))


def scaled(amax: float) -> float:
    """amax / 448 rounded up to a BF16 number."""
    near = float(ml_dtypes.bfloat16(amax / 448))
    if near >= amax / 448:
        return near
    return float(np.nextafter(ml_dtypes.bfloat16(near), ml_dtypes.bfloat16(np.inf)))


def rounded(values: np.ndarray, scale: float) -> np.ndarray:
    quotient = np.clip(values.astype(np.float32) / np.float32(scale), -448, 448)
    return quotient.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def expected(before: np.ndarray, behind: np.ndarray, units: np.ndarray) -> float:
    """Every fourth row under one of four scales; the whole weight under one."""
    x = np.empty_like(X)
    for turn, moved in enumerate((1.0, 1.03, 1.07, 1.13)):
        scale = scaled((AMAX / before).max() * moved)
        x[turn::4] = rounded(X[turn::4] / before, scale)
    weight = before[:, None] * W / behind
    w = rounded(weight, scaled(np.abs(weight).max()))
    error = ((x @ w) * behind - X @ W) * units
    return float((error**2).sum() / ((X @ W * units) ** 2).sum())


def measured(
    product: Product, before: np.ndarray, behind: np.ndarray, rounding: Rounding = PER_TENSOR
) -> float:
    return product.relative_error(X, product.exact(X), before, behind, rounding)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_formula(seed: int | None) -> None:
    before, behind, units = np.ones(K), np.ones(N), np.ones(N)
    if seed is not None:
        random = np.random.default_rng(seed)
        before, behind, units = (np.exp(random.normal(size=size)) for size in (K, N, N))
    found = measured(Product(AMAX, W, ALL, units), before, behind)
    assert found == pytest.approx(expected(before, behind, units), rel=1e-6)
    assert 1e-4 < found < 1e-2


def test_saturation_another_format_and_nothing() -> None:
    assert measured(Product(AMAX / 100, W, ALL), *ONES) > 0.5
    # E5M2 has one bit less: four times the energy of E4M3.
    rounding = Rounding(E5M2, (Granularity.PER_TENSOR,))
    product = Product(AMAX, W, ALL)
    assert measured(product, *ONES, rounding) / measured(product, *ONES) == pytest.approx(4, rel=0.2)
    product = Product(AMAX, np.zeros((K, N)), ALL)
    assert measured(product, *ONES, Rounding()) == 0.0


def test_the_better_granularity_counts_for_some_columns_too() -> None:
    # One column is 10⁶ times as large: under one scale the others vanish.
    weight = W.copy()
    weight[:, 0] *= 1e6
    product = Product(AMAX, weight, np.arange(1, N))
    one = measured(product, *ONES)
    both = measured(product, *ONES, Rounding())
    assert one == pytest.approx(1.0, rel=1e-3)
    assert both < 2e-3
    assert both == measured(product, *ONES, Rounding(weights=(Granularity.PER_CHANNEL,)))
    weight = W.copy()
    weight[:, 0] *= 1e6
    assert measured(Product(AMAX, weight, np.array([3, 7])), *ONES) == pytest.approx(1.0, rel=1e-3)
