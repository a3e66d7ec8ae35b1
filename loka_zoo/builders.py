"""Models by name, and as a run file names one: ``model: {torch: "loka_zoo.builders:build", ...}``.

PyTorch is imported when a model is created, not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import MissingPackage
from loka_zoo.spec import PRESETS, FeatureSpec, config_of

if TYPE_CHECKING:
    from torch import nn


MODEL_NAMES = tuple(PRESETS)
_CLASSES = {"dlrm": "DLRM", "dcnv2": "DCNv2", "wukong": "Wukong", "interformer": "InterFormer"}


def create(name: str, features: FeatureSpec, preset: str = "reference", *, seed: int = 0) -> nn.Module:
    """Create a model of `MODEL_NAMES` with random weights drawn by `seed`, in evaluation mode.

    PyTorch's own generator is left as it was.

    Raises:
        ConfigError: When there is no such model or preset, or the sizes do not fit the features.
        MissingPackage: When PyTorch is not installed.
    """
    config = config_of(name, preset)
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "a model of the zoo needs PyTorch",
            where=f"model '{name}'",
            evidence=str(error),
            remedy="pip install 'loka-onnx[export]'",
        ) from error
    module = importlib.import_module(f"loka_zoo.{name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(module, _CLASSES[name])(features, config)
    return model.eval()


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
