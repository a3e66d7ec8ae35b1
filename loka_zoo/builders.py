"""A model of the zoo as a run file names it: ``model: {torch: "loka_zoo.builders:build", ...}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_zoo.registry import create
from loka_zoo.spec import FeatureSpec

if TYPE_CHECKING:
    from torch import nn


def build(
    architecture: str, size: str, categorical: Mapping[str, int], numeric: Sequence[str]
) -> tuple[nn.Module, dict[str, npt.NDArray[Any]]]:
    """A model with random weights, and one example row: `dense` (1, numeric) float32, `ids` (1, categorical)
    int64.

    `categorical` gives the number of ids of each feature, in the order of the `ids` input.
    """
    features = FeatureSpec(tuple(categorical.items()), tuple(numeric))
    example: dict[str, npt.NDArray[Any]] = {
        "dense": np.zeros((1, len(numeric)), dtype=np.float32),
        "ids": np.zeros((1, len(categorical)), dtype=np.int64),
    }
    return create(architecture, features, size), example
