"""Rounding of weights by the moments of their inputs, against OBQ written out and a least-squares solver."""

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.pipeline.weight_moments import BLOCK, DAMPING, Grid, Moments, energy, gptq
from loka_onnx.core.formats import E4M3FN, INT8, NumberFormat
from loka_onnx.core.recipe import Granularity
from loka_onnx.numerics.scales import weight_scales

Matrix = npt.NDArray[np.float64]
FORMATS = pytest.mark.parametrize("format", [INT8, E4M3FN], ids=str)
WEIGHTS = pytest.mark.parametrize("granularity", list(Granularity))


def gram_of(k: int, rows: int, seed: int) -> Matrix:
    """Second moments of correlated inputs."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, k)) @ random.standard_normal((k, k)) / np.sqrt(k)
    return x.T @ x


def weight_of(k: int, n: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal((k, n)).astype(np.float32).astype(np.float64)


def grid_of(weight: Matrix, format: NumberFormat, granularity: Granularity) -> Grid:
    scales = weight_scales(weight.astype(np.float32), granularity, 1, format)
    return Grid(scales if granularity is Granularity.PER_CHANNEL else np.float32(scales).reshape(()), format)


def written_out(weight: Matrix, gram: Matrix, grid: Grid) -> Matrix:
    """OBQ in a fixed order: after each rounding, the free weights solve for the least error anew."""
    order = np.argsort(-np.diag(gram), kind="stable")
    current = weight.copy()
    for step, k in enumerate(order):
        current[k] = grid.nearest(current[k])
        done, free = order[: step + 1], order[step + 1 :]
        if free.size:
            pull = gram[np.ix_(free, done)] @ (current[done] - weight[done])
            current[free] = weight[free] - np.linalg.solve(gram[np.ix_(free, free)], pull)
    return current


@FORMATS
@WEIGHTS
@pytest.mark.parametrize("k", [1, 2, 7, 24, BLOCK + 5])
def test_it_is_obq_in_the_order_of_the_diagonal(k, format, granularity):
    weight, gram = weight_of(k, 5, seed=k), gram_of(k, 4 * k + 8, seed=k + 1)
    grid = grid_of(weight, format, granularity)
    ours, reference = gptq(weight, gram, grid, damping=0.0), written_out(weight, gram, grid)
    # A value in the middle of two grid values may go either way by float64's noise; none does here.
    np.testing.assert_array_equal(ours, reference)


@FORMATS
@WEIGHTS
@pytest.mark.parametrize("seed", range(5))
def test_the_error_on_calibration_rows_falls(seed, format, granularity):
    weight, gram = weight_of(48, 16, seed), gram_of(48, 400, seed)
    grid = grid_of(weight, format, granularity)
    nearest = energy(weight - grid.nearest(weight), gram)
    assert energy(weight - gptq(weight, gram, grid), gram) < 0.8 * nearest


@FORMATS
def test_weights_on_the_grid_stay(format):
    weight = weight_of(20, 6, seed=0)
    grid = grid_of(weight, format, Granularity.PER_CHANNEL)
    on_grid = grid.nearest(weight)
    np.testing.assert_array_equal(gptq(on_grid, gram_of(20, 100, seed=1), grid), on_grid)


@FORMATS
def test_inputs_that_are_always_0_and_too_few_rows(format):
    weight, gram = weight_of(32, 4, seed=0), gram_of(32, 5, seed=1)
    gram[3] = gram[:, 3] = 0.0
    grid = grid_of(weight, format, Granularity.PER_TENSOR)
    rounded = gptq(weight, gram, grid)
    np.testing.assert_array_equal(rounded, grid.nearest(rounded))
    np.testing.assert_array_equal(rounded[3], grid.nearest(weight[3]))
    assert energy(weight - rounded, gram) < energy(weight - grid.nearest(weight), gram)
    dead = gptq(weight, np.zeros_like(gram), grid)
    np.testing.assert_array_equal(dead, grid.nearest(weight))


def test_least_squares_makes_up_for_the_error_of_inputs():
    random = np.random.default_rng(0)
    exact = random.standard_normal((500, 6)).astype(np.float32) + np.float32(3.0)
    rounded = (0.8 * exact + 0.1 * random.standard_normal(exact.shape)).astype(np.float32)
    weight, moments = weight_of(6, 3, seed=1), Moments()
    for part in range(0, 500, 100):
        moments.add(exact[part : part + 100], rounded[part : part + 100])
    x, y = (values.astype(np.float64) - values.mean(axis=0, dtype=np.float64) for values in (rounded, exact))
    # Damping as further rows that ask for no change.
    extra = np.eye(6) * np.sqrt(DAMPING * np.diag(x.T @ x).mean())
    wanted = np.linalg.lstsq(np.vstack([x, extra]), np.vstack([y @ weight, extra @ weight]), rcond=None)[0]
    np.testing.assert_allclose(moments.centred().least_squares(weight), wanted, rtol=1e-3)
