"""Health of a loaded engine: identity, skipped engines, and the self-test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import EngineError, LokaError


class Cause(StrEnum):
    """Reason why an engine of a bundle is not used; the label of a metric."""

    UNTRUSTED = "untrusted"
    """It is a program, and nobody vouches for the bundle."""
    PART = "part"
    """It takes ids, but looked-up rows are requested."""
    BACKEND = "backend"
    """This loader does not run engines of its backend."""
    DEVICE = "device"
    """This host has no device of its architecture."""
    LIBRARY = "library"
    """The library that runs it is not installed."""
    VERSION = "version"
    """The library has another version than the one that built it."""
    OPEN = "open"
    """It did not load."""
    SELF_TEST = "self_test"
    """It does not reproduce its expected outputs, or fails on a served batch size."""


@dataclass(frozen=True)
class Skipped:
    """A preferred engine of the bundle, and the reason why it does not run here."""

    engine: str
    reason: str
    cause: Cause = Cause.OPEN


@dataclass(frozen=True)
class Health:
    """Result of a self-test.

    Attributes:
        ready: True if the engine reproduces its expected outputs on the sample; `detail` says why not.
        is_fallback: True if it is the FP32 model because no other engine runs here.
        max_abs: Largest difference from the expected outputs of the sample, per output; empty when the engine
            failed. Its limits are `tolerance`.
        skipped: Engines that were preferred to this one.
        routes: Id of each engine by its largest number of rows, where several serve; else empty.
        order: Ids of the bundle's engines, in the order of trial on this host.
        served_sizes: Batch sizes with a CUDA graph, buffers or a program, ascending; a smaller request is
            padded to the next one unless that is too far. Empty where requests run unpadded.
        warm: Batch sizes that were run before the engine was returned, ascending.
        trust: Reason why programs of the bundle may be loaded: fingerprint of the key that signed it,
            ``caller`` for ``trust=True``; empty where they may not.
    """

    ready: bool
    detail: str
    engine: str
    backend: str
    plan: str
    architecture: str
    simulated: bool
    is_fallback: bool
    model_digest: str
    max_abs: dict[str, float]
    tolerance: dict[str, float]
    skipped: tuple[Skipped, ...]
    routes: dict[int, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    served_sizes: tuple[int, ...] = ()
    warm: tuple[int, ...] = ()
    trust: str = ""


def in_line(error: Exception) -> str:
    """Format an error in one line, with its evidence and remedy."""
    if not isinstance(error, LokaError):
        said = f"{type(error).__name__}: {str(error)[:400]}"
    else:
        said = f"{error.where}: {error.what}" if error.where else error.what
        said += f" ({error.evidence})" if error.evidence else ""
        said += f"; {error.remedy}" if error.remedy else ""
    return " ".join(said.split())


def largest_differences(
    outputs: tuple[TensorSpec, ...],
    answer: Mapping[str, npt.NDArray[Any]],
    expected: Mapping[str, npt.NDArray[Any]],
) -> dict[str, float]:
    """Largest absolute difference of each output, NaN for NaN; `EngineError` for another type or shape."""
    moved = {}
    for spec in outputs:
        if spec.name not in answer:
            raise EngineError(
                f"E1304 the engine has no output '{spec.name}'", evidence=f"outputs {sorted(answer)}"
            )
        got, wanted = answer[spec.name], expected[spec.name]
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            raise EngineError(
                f"E1305 output '{spec.name}' has another type or shape",
                evidence=f"{got.dtype}{got.shape}, expected {wanted.dtype}{wanted.shape}",
            )
        moved[spec.name] = float(
            np.max(np.abs(got.astype(np.float64) - wanted.astype(np.float64)), initial=0)
        )
    return moved
