"""An engine of a small model, built for the CPU or the GPU of this host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import in_fp32
from test_inductor import architecture_of, build
from tiny_models import TinyModel

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.engines.inductor.backend import InductorBackend

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("gpu", marks=[pytest.mark.slow, pytest.mark.gpu]),
]


@dataclass(frozen=True)
class Built:
    model: TinyModel
    artifact: EngineArtifact
    engine: Path

    @classmethod
    def on(cls, device: str, folder: Path, make: Callable[[Path], TinyModel]) -> Built:
        model = make(folder / "model")
        artifact = build(model, folder / "engines" / "e", architecture_of(device))
        assert artifact.path is not None
        return cls(model, artifact, folder / "engines" / artifact.path)

    def open(self) -> Any:
        return InductorBackend().open(self.artifact, self.engine)

    def inputs(self, rows: int) -> dict[str, Any]:
        return {"x": np.load(self.model.sample)["x"][:rows]}

    def exact(self, rows: int) -> Any:
        # Softmax of a row that is masked throughout is NaN, before a guard.
        with np.errstate(invalid="ignore"):
            return ReferenceEvaluator(in_fp32(onnx.load(self.model.path))).run(None, self.inputs(rows))[0]
