"""Weights chosen by second moments of their inputs: GPTQ, and least squares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from loka_onnx.core.formats import NumberFormat
from loka_onnx.numerics.rounding import fake_quantize

Matrix = npt.NDArray[np.float64]
DAMPING = 0.01
BLOCK = 128


@dataclass(frozen=True)
class Grid:
    """The grid of a weight (K, N); `scales` are () or (N,)."""

    scales: npt.NDArray[np.float32]
    format: NumberFormat

    def nearest(self, rows: Matrix) -> Matrix:
        """Round (…, N) to the nearest values."""
        axis = rows.ndim - 1 if self.scales.ndim else None
        return fake_quantize(rows, self.scales, self.format, axis).astype(np.float64)


def gptq(weight: Matrix, gram: Matrix, grid: Grid, damping: float = DAMPING) -> Matrix:
    """Round a weight (K, N) by the second moments (K, K) of its inputs.

    Args:
        weight: In the model.
        gram: H; may be singular if `damping` is not 0.
        grid: What is rounded to.
        damping: Added to the diagonal of H, over its mean.
    """
    order = np.argsort(-np.diag(gram), kind="stable")
    free, diagonal = weight[order], np.diag(gram)[order]
    # An input that is always 0 does not matter to the output; 1 keeps H regular.
    shift = damping * diagonal.mean() + (diagonal == 0.0)
    factor = scipy.linalg.cholesky(gram[np.ix_(order, order)] + np.diag(shift), lower=True)
    # The upper factor U of H⁻¹ = UᵀU holds the updates of all steps.
    upper = scipy.linalg.cholesky(scipy.linalg.cho_solve((factor, True), np.eye(len(order))))
    rounded = np.empty_like(free)
    for start in range(0, len(order), BLOCK):
        stop = min(start + BLOCK, len(order))
        errors = np.empty((stop - start, free.shape[1]))
        for k in range(start, stop):
            rounded[k] = grid.nearest(free[k])
            errors[k - start] = (free[k] - rounded[k]) / upper[k, k]
            free[k + 1 : stop] -= np.outer(upper[k, k + 1 : stop], errors[k - start])
        free[stop:] -= upper[start:stop, stop:].T @ errors
    result = np.empty_like(rounded)
    result[order] = rounded
    return result


def energy(error: Matrix, gram: Matrix) -> float:
    """Σ‖xE‖² of an error (K, N) of a weight, for inputs with the second moments `gram`."""
    return float(np.sum(error * (gram @ error)))


@dataclass
class Moments:
    """Sums over calibration rows for one site, x exact and x̂ rounded.

    Attributes:
        gram: (K, K) Σ x̂ᵀx̂.
        cross: (K, K) Σ x̂ᵀx.
        error: (K, K) Σ (x̂ − x)ᵀ(x̂ − x).
        low: (K,) Σ x̂.
        high: (K,) Σ x.
        count: Number of rows.
    """

    gram: Any = 0.0
    cross: Any = 0.0
    error: Any = 0.0
    low: Any = 0.0
    high: Any = 0.0
    count: int = 0

    def add(self, exact: npt.NDArray[Any], rounded: npt.NDArray[Any]) -> None:
        """Add rows (rows, K)."""
        error = rounded - exact
        self.gram += (rounded.T @ rounded).astype(np.float64)
        self.cross += (rounded.T @ exact).astype(np.float64)
        self.error += (error.T @ error).astype(np.float64)
        self.low += rounded.sum(axis=0, dtype=np.float64)
        self.high += exact.sum(axis=0, dtype=np.float64)
        self.count += len(exact)

    def centred(self) -> Moments:
        """The same about the means."""
        low, high = self.low, self.high
        return replace(
            self,
            gram=self.gram - np.outer(low, low) / self.count,
            cross=self.cross - np.outer(low, high) / self.count,
            error=self.error - np.outer(low - high, low - high) / self.count,
        )

    def least_squares(self, weight: Matrix) -> Matrix:
        """The weight whose product with x̂ is nearest to xW."""
        diagonal = np.diag(self.gram)
        damped = self.gram + np.diag(DAMPING * diagonal.mean() + (diagonal == 0.0))
        return weight + scipy.linalg.solve(damped, (self.cross - self.gram) @ weight, assume_a="pos")
