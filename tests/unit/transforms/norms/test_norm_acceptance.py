"""TensorRT for RTX parses and builds every graph that the norm mods make, together with its neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import pytest
from norm_models import Exporter, fused, rows_of, taken_in
from rewrite_models import named, parse

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.norms.fuse import RMS_OPSET
from loka_onnx.transforms.precision.explicit_casts import cast_to_base

TORCHSCRIPT = Exporter("torchscript", 20)


def of_pytorch(folder: Path) -> dict[str, onnx.ModelProto]:
    pytest.importorskip("torch", reason="needs torch")
    import test_norm_exporters as exporters

    names = [*exporters.FUSED, *exporters.MIXED]
    return {
        name: fused(taken_in(exporters.exported(name, TORCHSCRIPT), folder / name), folder / name).after
        for name in names
    }


def together(models: dict[str, onnx.ModelProto]) -> onnx.ModelProto:
    """Models side by side in one graph, at the operator set of RMSNormalization."""
    graph = onnx.GraphProto(name="together")
    for name, model in models.items():
        one = onnx.compose.add_prefix(model, f"{name}/").graph
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(graph, field).extend(getattr(one, field))
    joined = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", RMS_OPSET)], ir_version=11
    )
    onnx.checker.check_model(joined)
    return joined


def build(model: onnx.ModelProto, folder: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.engines.request import BatchRange
    from loka_onnx.engines.tensorrt.build import BuildSettings, build_engine

    onnx.save(model, folder / "together.onnx")
    build_engine(
        trt, folder / "together.onnx", BuildSettings("sm89", BatchRange(1, 8, 16)), folder / "engine.trt"
    )
    assert (folder / "engine.trt").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorrt_rtx_builds_every_result(tmp_path: Path) -> None:
    models = of_pytorch(tmp_path)
    for name, model in models.items():
        onnx.save(model, tmp_path / "one.onnx")
        outputs = OnnxSession(tmp_path / "one.onnx").run(rows_of(model))
        assert all(np.isfinite(value).all() for value in outputs.values()), name
    build(together(models), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("op", ["HardSwish", "Mish"])
def test_the_operator_set_of_rms_norm_brings_no_type_that_engines_lack(op: str, tmp_path: Path) -> None:
    """Operator set 22 gave them BF16, which TensorRT for RTX 1.7.1 refuses."""
    model = parse(
        f"[norm] n = RMSNormalization<axis=-1>(x, gain) h = {op}(n) [fc] y = MatMul(h, w)",
        {"gain": np.ones(8), "w": np.eye(8)},
        opset=RMS_OPSET,
    )
    onnx.save(model, tmp_path / "m.onnx")
    graph = GraphModel.load(tmp_path / "m.onnx")
    cast_to_base(graph, Precision.BF16, PrecisionPlan("bf16", "digest", Precision.BF16, (), {}, 0.0))
    graph.save(tmp_path / "cast.onnx")
    cast = onnx.load(tmp_path / "cast.onnx")
    types = {
        info.name: info.type.tensor_type.elem_type
        for info in onnx.shape_inference.infer_shapes(cast).graph.value_info
    }
    # The norm itself runs in BF16: it came with BF16, and takes its statistics in FP32.
    assert types[named(cast, "norm").output[0]] == onnx.TensorProto.BFLOAT16
    assert types[named(cast, "block/h").output[0]] == onnx.TensorProto.FLOAT
    build(cast, tmp_path)
