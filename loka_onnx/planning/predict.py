"""Time of a kernel on a shape: measured, or predicted from the shapes that were.

**The roofline.** A kernel takes at least its launch, at least its arithmetic over the rate of the device, and
at least its bytes over the bandwidth (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009). Near
where two of them meet a kernel overlaps them badly: their sum fits small shapes better than their maximum:

    t₀(M, N, K) = launch + operations/rate + bytes/bandwidth,

each of the three ≥ 0, fitted to the measured times by relative least squares (`scipy.optimize.nnls`).

**The correction.** What is left, ln(t/t₀), is interpolated over (log₂M, log₂N, log₂K) by simple kriging with
the Matérn-3/2 covariance: exact at what was measured, and 0 far from all of it, where the roofline alone
answers. The length over which times resemble each other is the one with the smallest leave-one-out error
(Dubrule, "Cross validation of kriging in a unique neighborhood", 1983), and the same errors set the scale of
the kriging variance, so that a predicted time comes with a standard error that was seen on measured ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
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
    """Time of a kernel on a shape.

    Attributes:
        kernel: The kernel.
        us: Microseconds.
        is_measured: Whether it was measured on this very shape; else it is predicted.
        error_us: Standard error, microseconds: of a measured time its spread (0 where that is not known), of
            a predicted one what prediction was seen to err by.
    """

    kernel: Kernel
    us: float
    is_measured: bool
    error_us: float


@dataclass(frozen=True)
class Compared:
    """Times of one product that may be held against each other.

    Attributes:
        base: In the base precision.
        float8: In FP8.
    """

    base: Estimate
    float8: Estimate


class KernelModel:
    """Times of one kernel over all shapes.

    Args:
        timings: Its measured times, at least one, each shape once.

    Raises:
        ValueError: They are of several kernels, or there are none.
    """

    def __init__(self, timings: Sequence[KernelTiming]) -> None:
        if len({timing.kernel for timing in timings}) != 1:
            raise ValueError("a model of times is of one kernel")
        self.kernel = timings[0].kernel
        self._measured = {timing.shape: timing for timing in timings}

    def estimate(self, shape: Shape) -> Estimate | None:
        """Time on a shape; None where it was not measured and too little else was (`FEWEST`)."""
        known = self._measured.get(shape)
        if known is not None:
            return Estimate(self.kernel, known.us, True, known.spread_us or 0.0)
        if len(self._measured) < FEWEST:
            return None
        us, relative = self._fit.predict(shape)
        return Estimate(self.kernel, us, False, us * relative)

    def leave_one_out(self) -> tuple[float, ...]:
        """Relative error of each measured time when it is predicted from the others, sign included.

        Everything is fitted again without it; empty where too little was measured to predict from.
        """
        if len(self._measured) <= FEWEST:
            return ()
        found = []
        for shape, timing in self._measured.items():
            others = [other for other in self._measured.values() if other.shape != shape]
            us, _ = _Fit(self.kernel, others).predict(shape)
            found.append(us / timing.us - 1.0)
        return tuple(found)

    @cached_property
    def _fit(self) -> _Fit:
        return _Fit(self.kernel, list(self._measured.values()))


class TimeTable:
    """Times of every kernel of one device.

    Args:
        timings: Measured times; of several of one kernel on one shape the last one stands.
    """

    def __init__(self, timings: Iterable[KernelTiming]) -> None:
        by_kernel: dict[Kernel, dict[Shape, KernelTiming]] = {}
        for timing in timings:
            by_kernel.setdefault(timing.kernel, {})[timing.shape] = timing
        self._models = {kernel: KernelModel(list(found.values())) for kernel, found in by_kernel.items()}

    @property
    def models(self) -> tuple[KernelModel, ...]:
        """One for each kernel."""
        return tuple(self._models.values())

    def product(
        self, backend: str, precision: Precision, shape: Shape, scales: Granularity | None = None
    ) -> Estimate | None:
        """The fastest kernel of a product alone; measured times stand before predicted ones.

        Args:
            backend: Engine maker.
            precision: Of the operands.
            shape: M×K by K×N.
            scales: Of an FP8 weight. One scale serves where a kernel wants one for each channel as well.
        """
        of_product = self._kernels(backend, precision, scales)
        return self._best(shape, (kernel for kernel in of_product if kernel.name != PRODUCT))

    def compared(
        self, backend: str, base: Precision, shape: Shape, scales: Granularity | None
    ) -> Compared | None:
        """What a product takes in the base precision and in FP8, like held against like.

        Either both are what engines run (`PRODUCT`) or both products alone: a time with what follows the
        product says nothing beside one without. The former only where both were measured: what follows is up
        to the site, and no function of the shape that could be predicted.

        Args:
            backend: Engine maker.
            base: What FP8 is held against. FP16 is held to BF16 where that alone was timed: tensor cores
                multiply both at one rate, and both have two bytes.
            shape: M×K by K×N.
            scales: Of the weight in FP8.

        Returns:
            None where one of the two is not known.
        """
        half = (base, Precision.BF16) if base is Precision.FP16 else (base,)
        built = _first(self._built(backend, each, shape, None) for each in half)
        built8 = self._built(backend, Precision.FP8, shape, scales)
        if built is not None and built8 is not None:
            return Compared(built, built8)
        alone = _first(self.product(backend, each, shape) for each in half)
        alone8 = self.product(backend, Precision.FP8, shape, scales)
        return None if alone is None or alone8 is None else Compared(alone, alone8)

    def _built(
        self, backend: str, precision: Precision, shape: Shape, scales: Granularity | None
    ) -> Estimate | None:
        of_product = self._kernels(backend, precision, scales)
        found = self._best(shape, (kernel for kernel in of_product if kernel.name == PRODUCT))
        return found if found is not None and found.is_measured else None

    def _kernels(self, backend: str, precision: Precision, scales: Granularity | None) -> Iterable[Kernel]:
        wanted = {scales, Granularity.PER_CHANNEL} if scales is Granularity.PER_TENSOR else {scales}
        return (
            kernel
            for kernel in self._models
            if kernel.name != QUANTIZE
            and not kernel.fused_quantize
            and (kernel.backend, kernel.precision) == (backend, precision)
            and kernel.scales in wanted
        )

    def quantize(self, backend: str, rows: int, columns: int) -> Estimate | None:
        """The fastest cast of an activation to FP8 by itself."""
        of_backend = (k for k in self._models if k.name == QUANTIZE and k.backend == backend)
        return self._best(Shape(rows, 0, columns), of_backend)

    def _best(self, shape: Shape, kernels: Iterable[Kernel]) -> Estimate | None:
        found = [self._models[kernel].estimate(shape) for kernel in kernels]
        known = [estimate for estimate in found if estimate is not None]
        return min(known, key=lambda estimate: (not estimate.is_measured, estimate.us), default=None)


def _first(found: Iterable[Estimate | None]) -> Estimate | None:
    return next((estimate for estimate in found if estimate is not None), None)


class _Fit:
    def __init__(self, kernel: Kernel, timings: Sequence[KernelTiming]) -> None:
        self._kernel = kernel
        features = np.array([self._features(timing.shape) for timing in timings])
        us = np.array([timing.us for timing in timings])
        scale = features.max(axis=0)
        scale[scale == 0.0] = 1.0
        weights, _ = nnls(features / scale / us[:, None], np.ones(len(us)))
        self._roofline = weights / scale
        self._where = np.array([_coordinates(timing.shape) for timing in timings])
        self._left = np.log(us / (features @ self._roofline))
        self._length, self._variance = self._resemblance()
        self._factor = cho_factor(self._covariance(self._length))

    def predict(self, shape: Shape) -> tuple[float, float]:
        """Microseconds, and the standard error relative to them."""
        at = np.array([_coordinates(shape)])
        near = _matern(_distances(at, self._where) / self._length)[0]
        solved = cho_solve(self._factor, near)
        us = float(self._features(shape) @ self._roofline) * float(np.exp(solved @ self._left))
        unknown = max(0.0, 1.0 - float(near @ solved))
        return us, float(np.sqrt(self._variance * unknown))

    def _features(self, shape: Shape) -> Floats:
        return np.array([1.0, shape.flops, _bytes_moved(self._kernel, shape)])

    def _resemblance(self) -> tuple[float, float]:
        """The correlation length with the smallest leave-one-out error, and the variance that it shows."""
        tried = []
        for length in LENGTHS:
            inverse = np.linalg.inv(self._covariance(length))
            diagonal = np.diag(inverse)
            errors = (inverse @ self._left) / diagonal
            variance = float(np.mean(errors**2 * diagonal))
            tried.append((float(np.mean(errors**2)), length, variance))
        _, length, variance = min(tried)
        return length, variance

    def _covariance(self, length: float) -> Floats:
        distances = _distances(self._where, self._where) / length
        covariance: Floats = _matern(distances) + _JITTER * np.eye(len(distances))
        return covariance


def _bytes_moved(kernel: Kernel, shape: Shape) -> int:
    """Bytes of both operands and the result, each touched once; results are of two bytes unless FP32."""
    one = {Precision.FP32: 4, Precision.FP8: 1}.get(kernel.precision, 2)
    if kernel.name == QUANTIZE:
        return shape.m * shape.k * (2 + one)
    return one * (shape.m * shape.k + shape.k * shape.n) + max(one, 2) * shape.m * shape.n


def _coordinates(shape: Shape) -> Floats:
    return np.log2([shape.m, max(shape.n, 1), shape.k])


def _distances(a: Floats, b: Floats) -> Floats:
    return np.asarray(np.linalg.norm(a[:, None] - b[None], axis=-1), dtype=np.float64)


def _matern(distance: Floats) -> Floats:
    scaled = np.sqrt(3.0) * distance
    return np.asarray((1.0 + scaled) * np.exp(-scaled), dtype=np.float64)
