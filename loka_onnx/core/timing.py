"""Measured times of kernels: what a matrix product or a quantize step takes on one device.

A time belongs to a kernel (whose, in which precision, how scaled) and to a shape. Where it comes from is
part of it: a time without device, versions, clocks and date cannot be compared with another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.serde import STRICT

QUANTIZE = "quantize"
"""`Kernel.name` of the cast of an activation to FP8 by itself; its shape has no N."""
PRODUCT = "product"
"""`Kernel.name` of what engines really run at a shape: the fastest of the kernels that were tried there, with
what follows the product (bias, activation, sum, the cast of its result) inside or behind it, without the cast
of what it reads. It is held against another time of this name only."""


@dataclass(frozen=True, order=True)
class Shape:
    """M×K by K×N.

    Attributes:
        m: Rows of the product: rows of a site for each example, times the batch.
        n: Columns; 0 where nothing is multiplied (`QUANTIZE`).
        k: Length of the contraction.

    Raises:
        ValueError: M or K is not positive, or N is negative.
    """

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        if self.m < 1 or self.k < 1 or self.n < 0:
            raise ValueError(f"{self} is no shape of a product: M and K are at least 1, N at least 0")

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k}" if self.n else f"{self.m}×{self.k}"

    @property
    def flops(self) -> int:
        """2·M·N·K; 0 where nothing is multiplied."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Kernel:
    """What was timed, apart from the shape.

    Attributes:
        device: As run files name it, for example ``nvidia-h100``.
        backend: Engine maker whose engines run this kernel.
        name: Library and variant, for example ``scaled_mm`` or ``scaled_mm-fast``; `QUANTIZE` for the cast.
        precision: Of both operands; of `QUANTIZE` what it casts to.
        scales: Over which elements of an FP8 weight one scale is shared; None for other precisions and for
            `QUANTIZE`.
        fused_quantize: Whether the time has the cast of the activation in it.
    """

    device: str
    backend: str
    name: str
    precision: Precision
    scales: Granularity | None = None
    fused_quantize: bool = False

    def __str__(self) -> str:
        parts = [self.name, str(self.precision), *([str(self.scales)] if self.scales else [])]
        return f"{self.backend}:{'/'.join(parts)}{'+quantize' if self.fused_quantize else ''}"

    @property
    def key(self) -> tuple[str, ...]:
        """The fields as text, which order kernels and name them in a database."""
        fused = "fused" if self.fused_quantize else ""
        return (self.device, self.backend, self.name, str(self.precision), str(self.scales or ""), fused)


@dataclass(frozen=True)
class Provenance:
    """Where times come from.

    Attributes:
        device_name: As its driver names it.
        versions: Of the libraries and the driver.
        clocks: What is known of the clocks while it ran; empty where nothing is.
        date: Day or time of the measurement, ISO 8601.
        note: How it was measured, and what a reader must know.
    """

    device_name: str
    versions: dict[str, str]
    clocks: str
    date: str
    note: str = ""


@dataclass(frozen=True)
class KernelTiming:
    """One measured time.

    Attributes:
        kernel: What was timed.
        shape: On which shape.
        us: Median, microseconds.
        spread_us: Half of the distance between the quartiles, microseconds; None where it was not recorded.
        provenance: Where it comes from.
        repeats: How many times it is the median of; 0 where that was not recorded.
        error: Root mean square difference from the product of the same rounded operands in float64, over
            that product's root mean square: what the kernel's own arithmetic adds (it accumulates in fewer
            bits). None where it was not measured.

    Raises:
        ValueError: The time is not positive and finite.
    """

    kernel: Kernel
    shape: Shape
    us: float
    spread_us: float | None
    provenance: Provenance
    repeats: int = 0
    error: float | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.us) and self.us > 0.0):
            raise ValueError(f"{self.us} µs is no time of {self.kernel} on {self.shape}")


@dataclass(frozen=True)
class TimedShape:
    """One shape of a series; the fields are those of `KernelTiming`."""

    m: int
    n: int
    k: int
    us: float
    spread_us: float | None = None
    repeats: int = 0
    error: float | None = None


@dataclass(frozen=True)
class TimingSeries:
    """Times of one kernel from one measurement.

    Attributes:
        kernel: What was timed.
        provenance: Where the times come from.
        shapes: Each shape with its time.
    """

    kernel: Kernel
    provenance: Provenance
    shapes: tuple[TimedShape, ...]


@dataclass(frozen=True)
class TimingRecords:
    """Times as they are shipped and exchanged.

    Attributes:
        series: In the order of their kernels.
    """

    SCHEMA: ClassVar[str] = "kernel-timings/1"
    __pydantic_config__ = STRICT

    series: tuple[TimingSeries, ...] = field(default=())

    @classmethod
    def of(cls, timings: Iterable[KernelTiming]) -> TimingRecords:
        """Times gathered into series, ordered by kernel and shape."""
        found: list[tuple[Kernel, Provenance, list[TimedShape]]] = []
        for timing in sorted(timings, key=lambda timing: (timing.kernel.key, timing.shape)):
            shape = timing.shape
            point = TimedShape(
                shape.m, shape.n, shape.k, timing.us, timing.spread_us, timing.repeats, timing.error
            )
            for kernel, provenance, points in found:
                if (kernel, provenance) == (timing.kernel, timing.provenance):
                    points.append(point)
                    break
            else:
                found.append((timing.kernel, timing.provenance, [point]))
        return cls(tuple(TimingSeries(kernel, source, tuple(points)) for kernel, source, points in found))

    @property
    def timings(self) -> tuple[KernelTiming, ...]:
        """One by one."""
        return tuple(
            KernelTiming(
                series.kernel,
                Shape(point.m, point.n, point.k),
                point.us,
                point.spread_us,
                series.provenance,
                point.repeats,
                point.error,
            )
            for series in self.series
            for point in series.shapes
        )
