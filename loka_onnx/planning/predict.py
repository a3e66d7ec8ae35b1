"""Time of a kernel on a shape: measured, or predicted from measured shapes.

**The roofline.** A kernel takes at least its launch, its arithmetic over the device's rate, and its bytes
over the bandwidth (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009). Near where two of them meet
they overlap badly: the sum fits small shapes better than the maximum:

    t₀(M, N, K) = launch + operations/rate + bytes/bandwidth,

each of the three ≥ 0, fitted to the measured times by relative least squares (`scipy.optimize.nnls`).

**The correction.** The residual ln(t/t₀) is interpolated over (log₂M, log₂N, log₂K) by simple kriging with
the Matérn-3/2 covariance: exact at measured shapes, and 0 far from all of them. The correlation length is the
one with the smallest leave-one-out error (Dubrule, "Cross validation of kriging in a unique neighborhood",
1983), and the same errors scale the kriging variance, so the standard error of a prediction reflects errors
seen on measured times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import scipy

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.core.timing import PRODUCT, QUANTIZE, Kernel, KernelTiming, Shape

FEWEST = 6
"""Measured shapes of a kernel from which others are predicted: twice the parameters of the roofline."""
LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Candidates for the correlation length, in doublings of M, N or K."""
_JITTER = 1e-9
"""Keeps the covariance positive definite where shapes nearly coincide; moves a measured time by less than a
millionth of its correction."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a kernel on a shape, measured there or predicted.

    `error_us` is the standard error: the spread of a measured time (0 where unknown), or the error seen when
    measured times are predicted.
    """

    kernel: Kernel
    us: float
    is_measured: bool
    error_us: float


class KernelModel:
    """Times of one kernel over all shapes; of several on one shape the last one counts."""

    def __init__(self, timings: Sequence[KernelTiming]) -> None:
        self.kernel = timings[0].kernel
        self._measured = {timing.shape: timing for timing in timings}

    def estimate(self, shape: Shape) -> Estimate | None:
        """Return the time on a shape: measured, or predicted from `FEWEST` or more others; else None."""
        known = self._measured.get(shape)
        if known is not None:
            return Estimate(self.kernel, known.us, True, known.spread_us or 0.0)
        if len(self._measured) < FEWEST:
            return None
        us, relative = self._fit.predict(shape)
        return Estimate(self.kernel, us, False, us * relative)

    @cached_property
    def _fit(self) -> _Fit:
        return _Fit(self.kernel, list(self._measured.values()))


class TimeTable:
    """Times of every kernel of one device."""

    def __init__(self, timings: Iterable[KernelTiming]) -> None:
        by_kernel = defaultdict[Kernel, list[KernelTiming]](list)
        for timing in timings:
            by_kernel[timing.kernel].append(timing)
        self.models = {kernel: KernelModel(each) for kernel, each in by_kernel.items()}

    def product(
        self, backend: str, precision: Precision, shape: Shape, scales: Granularity | None = None
    ) -> Estimate | None:
        """Return the fastest kernel of a product alone; measured times precede predicted ones."""
        return self._best(shape, self._kernels(backend, precision, scales, are_built=False))

    def compared(
        self, backend: str, base: Precision, shape: Shape, recipe: Recipe
    ) -> tuple[Estimate, Estimate] | None:
        """Return a product's time in the base precision and under a recipe, measured alike; None if unknown.

        Either both are the kernels of engines (`PRODUCT`) or both products alone: a time with the following
        operations is not comparable to one without. The former only where both were measured: the following
        operations depend on the site and cannot be predicted from the shape. FP16 counts as BF16 where only
        that was timed: tensor cores multiply both at one rate, and both have two bytes.
        """
        half = (base, Precision.BF16) if base is Precision.FP16 else (base,)
        built = _first(self._built(backend, each, shape, None) for each in half)
        precision, scales = recipe.precision, recipe.weight
        built8 = self._built(backend, precision, shape, scales)
        if built is not None and built8 is not None:
            return built, built8
        alone = _first(self.product(backend, each, shape) for each in half)
        alone8 = self.product(backend, precision, shape, scales)
        return None if alone is None or alone8 is None else (alone, alone8)

    def _built(
        self, backend: str, precision: Precision, shape: Shape, scales: Granularity | None
    ) -> Estimate | None:
        fastest = self._best(shape, self._kernels(backend, precision, scales, are_built=True))
        return fastest if fastest is not None and fastest.is_measured else None

    def _kernels(
        self, backend: str, precision: Precision, scales: Granularity | None, *, are_built: bool
    ) -> Iterable[Kernel]:
        """Yield the kernels of a product: those of engines (`PRODUCT`), or of products alone."""
        wanted = {scales, Granularity.PER_CHANNEL} if scales is Granularity.PER_TENSOR else {scales}
        return (
            kernel
            for kernel in self.models
            if kernel.name != QUANTIZE
            and (kernel.name == PRODUCT) is are_built
            and not kernel.fused_quantize
            and (kernel.backend, kernel.precision) == (backend, precision)
            and kernel.scales in wanted
        )

    def quantize(self, backend: str, precision: Precision, rows: int, columns: int) -> Estimate | None:
        """Return the fastest cast of an activation by itself."""
        of_backend = (
            k for k in self.models if (k.name, k.backend, k.precision) == (QUANTIZE, backend, precision)
        )
        return self._best(Shape(rows, 0, columns), of_backend)

    def _best(self, shape: Shape, kernels: Iterable[Kernel]) -> Estimate | None:
        estimates = [self.models[kernel].estimate(shape) for kernel in kernels]
        known = [estimate for estimate in estimates if estimate is not None]
        return min(known, key=lambda estimate: (not estimate.is_measured, estimate.us), default=None)


def _first(estimates: Iterable[Estimate | None]) -> Estimate | None:
    return next((estimate for estimate in estimates if estimate is not None), None)


class _Fit:
    def __init__(self, kernel: Kernel, timings: Sequence[KernelTiming]) -> None:
        self._kernel = kernel
        features = np.array([self._features(timing.shape) for timing in timings])
        us = np.array([timing.us for timing in timings])
        scale = features.max(axis=0)
        scale[scale == 0.0] = 1.0
        weights, _ = scipy.optimize.nnls(features / scale / us[:, None], np.ones(len(us)))
        self._roofline = weights / scale
        self._where = np.array([_coordinates(timing.shape) for timing in timings])
        self._left = np.log(us / (features @ self._roofline))
        self._length, self._variance = self._resemblance()
        self._factor = scipy.linalg.cho_factor(self._covariance(self._length))

    def predict(self, shape: Shape) -> tuple[float, float]:
        """Return microseconds and their relative standard error."""
        at = np.array([_coordinates(shape)])
        near = _matern(scipy.spatial.distance.cdist(at, self._where) / self._length)[0]
        solved = scipy.linalg.cho_solve(self._factor, near)
        us = float(self._features(shape) @ self._roofline) * float(np.exp(solved @ self._left))
        unknown = max(0.0, 1.0 - float(near @ solved))
        return us, float(np.sqrt(self._variance * unknown))

    def _features(self, shape: Shape) -> Floats:
        return np.array([1.0, shape.flops, _bytes_moved(self._kernel, shape)])

    def _resemblance(self) -> tuple[float, float]:
        """Return the correlation length with the smallest leave-one-out error, and its variance."""

        def errors(length: float) -> tuple[float, float, float]:
            inverse = np.linalg.inv(self._covariance(length))
            diagonal = np.diag(inverse)
            squares = ((inverse @ self._left) / diagonal) ** 2
            return float(np.mean(squares)), length, float(np.mean(squares * diagonal))

        _, length, variance = min(map(errors, LENGTHS))
        return length, variance

    def _covariance(self, length: float) -> Floats:
        distances = scipy.spatial.distance.cdist(self._where, self._where) / length
        covariance: Floats = _matern(distances) + _JITTER * np.eye(len(distances))
        return covariance


def _bytes_moved(kernel: Kernel, shape: Shape) -> int:
    """Return the bytes of both operands and the result, which has two bytes unless FP32, touched once."""
    one = 4 if kernel.precision is Precision.FP32 else 1 if kernel.precision.is_quantized else 2
    if kernel.name == QUANTIZE:
        return shape.m * shape.k * (2 + one)
    return one * (shape.m * shape.k + shape.k * shape.n) + max(one, 2) * shape.m * shape.n


def _coordinates(shape: Shape) -> Floats:
    return np.log2([shape.m, max(shape.n, 1), shape.k])


def _matern(distance: Floats) -> Floats:
    scaled = np.sqrt(3.0) * distance
    return np.asarray((1.0 + scaled) * np.exp(-scaled), dtype=np.float64)
