"""Smoothing by given factors, where the mod measures its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.makers import Maker, find_makers, smooth


class Smooth(Mod[Maker]):
    name = "smooth"

    def __init__(self, factors: Mapping[str, Any]) -> None:
        self.factors = {name: np.asarray(values, np.float64) for name, values in factors.items()}

    def _find(self, model: GraphModel) -> Iterator[Maker | Declined]:
        for found in find_makers(model):
            if (found.at if isinstance(found, Declined) else found.name) in self.factors:
                yield found

    def rewrite(self, model: GraphModel, match: Maker) -> Applied:
        return smooth(model, match, self.factors[match.name])
