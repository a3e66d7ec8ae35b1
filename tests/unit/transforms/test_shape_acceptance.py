"""TensorRT for RTX parses and builds every graph that the shape mods make: one engine for each mod's.

Not one engine for all: its compiler (1.7.1) fails on some pairs of graphs that have nothing to do with each
other, also before any mod (a Reshape and Relu beside a Transpose and two products).
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.compose
import pytest
from rewrite_models import artifact
from shape_cases import MODS
from shape_models import feeds

from loka_onnx.transforms.sequence import apply_mods


def rewritten(kind: str, name: str, folder: Path) -> onnx.ModelProto:
    """The model of a case after its mod, every name prefixed with that of the case."""
    mod, model = MODS[kind][0](), MODS[kind][1][name].model()
    source = artifact(model, folder / name / "before.onnx")
    result = apply_mods(source, [feeds(model)], folder / name / "after.onnx", [mod])
    assert result.log.records[0].applied
    return onnx.compose.add_prefix(onnx.load(result.model.path), f"{name}/")


def together(models: list[onnx.ModelProto]) -> onnx.ModelProto:
    """Models side by side in one graph, which share nothing but the batch."""
    joined = models[0]
    for model in models[1:]:
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(joined.graph, field).extend(getattr(model.graph, field))
    onnx.checker.check_model(joined)
    return joined


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MODS)
def test_tensorrt_rtx_builds_every_result(kind: str, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.engines.request import BatchRange
    from loka_onnx.engines.tensorrt.build import BuildSettings, build_engine

    path = tmp_path / "together.onnx"
    # Engines have one dynamic axis, the batch.
    names = [name for name, case in MODS[kind][1].items() if "steps" not in case.inputs]
    onnx.save(together([rewritten(kind, name, tmp_path) for name in names]), path)
    build_engine(trt, path, BuildSettings("sm89", BatchRange(1, 8, 16)), tmp_path / "engine.trt")
    assert (tmp_path / "engine.trt").stat().st_size > 0
