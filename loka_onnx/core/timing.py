"""Measured times of kernels (matrix products, quantize steps) on one device, with their provenance."""

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
"""`Kernel.name` of the fastest kernel tried at a shape, including what follows the product (bias, activation,
sum, cast of its result), excluding the cast of its input. Compare it only with times of this name."""


@dataclass(frozen=True, order=True)
class Shape:
    """M×K by K×N: M rows (those of a site for each example, times the batch); N is 0 for `QUANTIZE`."""

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
    """A timed kernel, apart from the shape, on a device by its name in run files.

    `name` is library and variant, for example ``scaled_mm`` or ``scaled_mm-fast``; `QUANTIZE` for the cast of
    an activation. `precision` is of both operands, or of the cast's result; `scales` are the granularity of
    an FP8 weight's (else None). With `fused_quantize` the time includes the cast of the activation.
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
        """The fields as text: sort key and database key."""
        fused = "fused" if self.fused_quantize else ""
        return (self.device, self.backend, self.name, str(self.precision), str(self.scales or ""), fused)


@dataclass(frozen=True)
class Provenance:
    """Origin of times: versions of libraries and driver, clocks (empty where unknown), date in ISO 8601."""

    device_name: str
    versions: dict[str, str]
    clocks: str
    date: str
    note: str = ""


@dataclass(frozen=True)
class KernelTiming:
    """One measured time: the median in microseconds, and half the interquartile range.

    `error` is the root mean square difference from the product of the same rounded operands in float64, over
    that product's root mean square: the kernel's own arithmetic error (it accumulates in fewer bits).
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
    """Times of one kernel from one measurement."""

    kernel: Kernel
    provenance: Provenance
    shapes: tuple[TimedShape, ...]


@dataclass(frozen=True)
class TimingRecords:
    """Times as they are shipped and exchanged."""

    SCHEMA: ClassVar[str] = "kernel-timings/1"
    __pydantic_config__ = STRICT

    series: tuple[TimingSeries, ...] = field(default=())

    @classmethod
    def of(cls, timings: Iterable[KernelTiming]) -> TimingRecords:
        """Group times into series, ordered by kernel and shape."""
        groups: list[tuple[Kernel, Provenance, list[TimedShape]]] = []
        for timing in sorted(timings, key=lambda timing: (timing.kernel.key, timing.shape)):
            size, measured = timing.shape, (timing.us, timing.spread_us, timing.repeats, timing.error)
            point = TimedShape(size.m, size.n, size.k, *measured)
            for kernel, provenance, points in groups:
                if (kernel, provenance) == (timing.kernel, timing.provenance):
                    points.append(point)
                    break
            else:
                groups.append((timing.kernel, timing.provenance, [point]))
        return cls(tuple(TimingSeries(kernel, source, tuple(points)) for kernel, source, points in groups))

    @property
    def timings(self) -> tuple[KernelTiming, ...]:
        """Return the times one by one."""
        return tuple(
            KernelTiming(s.kernel, Shape(p.m, p.n, p.k), p.us, p.spread_us, s.provenance, p.repeats, p.error)
            for s in self.series
            for p in s.shapes
        )
