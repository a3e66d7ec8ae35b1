"""Values that a run file may choose from."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from loka_onnx.core.backends import backend_names
from loka_onnx.core.formats import FORMATS, NumberFormat, Precision
from loka_onnx.core.plan import quantized_precision

if TYPE_CHECKING:
    Backend = str
else:
    Backend = Literal[backend_names()]
    """Name of a backend."""


class PlanId(StrEnum):
    """A precision assignment that competes."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_ALL = "fp8-all"
    FP8_SAFE = "fp8-safe"
    FP8_FAST = "fp8-fast"
    INT8_ALL = "int8-all"
    INT8_SAFE = "int8-safe"

    @property
    def quantized(self) -> Precision | None:
        """FP8 or INT8, of which its quantized sites are; None without any."""
        return quantized_precision(self)


class Executor(StrEnum):
    """Executor of calibration batches and build jobs."""

    LOCAL = "local"
    """Threads of this process; build jobs are left to be carried to their host."""
    RAY = "ray"
    """Machines of a Ray cluster."""


class Float8Format(StrEnum):
    """Name of an FP8 format (`core.formats`)."""

    E4M3FN = "E4M3FN"
    E4M3FNUZ = "E4M3FNUZ"
    E5M2 = "E5M2"

    @property
    def number_format(self) -> NumberFormat:
        """The format of that name."""
        return FORMATS[self.lower()]


class WeightGranularity(StrEnum):
    """Elements of a weight that share one scale."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    BEST = "best"
    """Per site, the one with the smaller measured error."""


class ScaleRule(StrEnum):
    """Rule from the range of an activation to its scale."""

    AMAX = "amax"
    PERCENTILE = "percentile"
    MSE = "mse"
    BEST = "best"
    """Per site, the one with the smallest measured error."""


class NullGroups(StrEnum):
    """Treatment of rows without a group."""

    REFUSE = "refuse"
    UNGROUP = "ungroup"
    """Each is a group of its own."""


class SplitBy(StrEnum):
    """Rule that divides one file."""

    ORDER = "order"
    """Contiguous rows in file order."""
    HASH = "hash"
    """By a hash of a key column, so that rows with one key stay together."""
