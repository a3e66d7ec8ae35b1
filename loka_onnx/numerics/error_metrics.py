"""Distance of an approximate array from an exact one, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import InternalError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


def relative_error(exact: Array, approximate: Array) -> float:
    """‖approximate − exact‖ / ‖exact‖.

    Args:
        exact: Any shape.
        approximate: The same shape.

    Returns:
        The ratio of Euclidean norms; 0 where both arrays are zero, infinite where only the exact one is.

    Raises:
        InternalError: The shapes differ.
    """
    e, a = _flat_pair(exact, approximate)
    noise, signal = float(np.linalg.norm(a - e)), float(np.linalg.norm(e))
    if signal == 0.0:
        return 0.0 if noise == 0.0 else float("inf")
    return noise / signal


def sqnr_db(exact: Array, approximate: Array) -> float:
    """Signal to quantization noise ratio, decibels: 20·log10(‖exact‖ / ‖approximate − exact‖).

    Args:
        exact: Any shape.
        approximate: The same shape.

    Returns:
        The ratio; infinite for equal arrays, minus infinite where only the exact one is zero.

    Raises:
        InternalError: The shapes differ.
    """
    error = relative_error(exact, approximate)
    if error == 0.0:
        return float("inf")
    return float(-20.0 * np.log10(error))


def cosine(exact: Array, approximate: Array) -> float:
    """Cosine of the angle between two arrays.

    Args:
        exact: Any shape.
        approximate: The same shape.

    Returns:
        A number in [-1, 1]; 1 where both arrays are zero, 0 where one is.

    Raises:
        InternalError: The shapes differ.
    """
    e, a = _flat_pair(exact, approximate)
    norms = float(np.linalg.norm(e)), float(np.linalg.norm(a))
    if 0.0 in norms:
        return 1.0 if norms == (0.0, 0.0) else 0.0
    return float(np.clip((e / norms[0]) @ (a / norms[1]), -1.0, 1.0))


def _flat_pair(exact: Array, approximate: Array) -> tuple[Rows, Rows]:
    if exact.shape != approximate.shape:
        raise InternalError(
            "arrays of different shapes are compared", evidence=f"{exact.shape} and {approximate.shape}"
        )
    return exact.astype(np.float64).ravel(), approximate.astype(np.float64).ravel()
