"""Smoothing by given factors, where the mod measures its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.smoothing.makers import Maker, find_makers, smooth


class Smooth(Mod[Maker]):
    name = "smooth"

    def __init__(self, factors: Mapping[str, Any]) -> None:
        self.factors = {name: np.asarray(values, np.float64) for name, values in factors.items()}

    def match(self, model: GraphModel) -> Found[Maker]:
        makers = find_makers(model)
        return Found(
            tuple(maker for maker in makers.found if maker.name in self.factors),
            tuple(declined for declined in makers.declined if declined.at in self.factors),
        )

    def rewrite(self, model: GraphModel, match: Maker) -> Applied:
        return smooth(model, match, self.factors[match.name])
