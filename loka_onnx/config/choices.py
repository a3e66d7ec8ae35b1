"""Words that a run file may choose from."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from loka_onnx.core.backends import backend_names

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


class Executor(StrEnum):
    """Where calibration batches are run, and build jobs are executed."""

    LOCAL = "local"
    """Threads of this process; build jobs are left to whoever carries them to their host."""
    RAY = "ray"
    """Machines of a Ray cluster."""


class WeightGranularity(StrEnum):
    """Over which elements of a weight one scale is shared."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    BEST = "best"
    """Per site, the one whose measured error is smaller."""


class ScaleRule(StrEnum):
    """How the range of an activation becomes its FP8 scale."""

    AMAX = "amax"
    PERCENTILE = "percentile"
    MSE = "mse"
    BEST = "best"
    """Per site, the one whose measured error is smallest."""


class NullGroups(StrEnum):
    """What becomes of rows without a group."""

    REFUSE = "refuse"
    UNGROUP = "ungroup"
    """Each is a group of its own."""


class SplitBy(StrEnum):
    """How one file is divided."""

    ORDER = "order"
    """Contiguous rows in file order."""
    HASH = "hash"
    """By a hash of a key column, so that rows that share a key stay together."""
