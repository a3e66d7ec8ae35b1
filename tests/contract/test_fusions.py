"""What `core.fusions` claims, read from compiled graphs: one kernel for an operator and the Q behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny_models import GraphWriter

from loka_onnx.core.formats import Precision
from loka_onnx.core.fusions import FUSIONS, fusions_of
from loka_onnx.core.site import SiteKind
from loka_onnx.engines.registry import backend_names
from loka_onnx.engines.request import BatchRange

WIDTH = 64
RTX = FUSIONS["tensorrt_rtx"]


def test_every_backend_is_described_and_an_unknown_one_fuses_nothing() -> None:
    assert set(FUSIONS) == set(backend_names())
    assert fusions_of("another").quantized_in_place == frozenset()
    assert fusions_of("another").evidence == "not known"


def operator(w: GraphWriter, kind: str, tensor: str, other: str) -> str:
    """The operator under test, named ``op``, of a tensor and, where it takes two, another."""
    attributes: dict[str, Any] = {"axis": -1} if kind in {"Softmax", "RMSNormalization"} else {}
    if kind in {"Add", "Sub", "Mul", "Div", "Max"}:
        return w.op(kind, [tensor, other], "op")
    if kind == "Clip":
        return w.op(kind, [tensor, w.constant("low", 0.0), w.constant("high", 6.0)], "op")
    if kind.endswith("Normalization"):
        return w.op(kind, [tensor, w.constant("gain", np.ones(WIDTH))], "op", **attributes)
    return w.op(kind, [tensor], "op", **attributes)


def kernels(folder: Path, kind: str, *, residual: bool) -> list[tuple[str, ...]]:
    """ONNX nodes behind each kernel of: product, residual sum if asked for, operator, Q, product."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.engines.tensorrt_rtx.build import BuildSettings, build_engine
    from loka_onnx.engines.tensorrt_rtx.compiled_graph import read_compiled_graphs

    w = GraphWriter(Precision.BF16)
    x = w.enter("x")
    h = product(w, x, "fc0")
    h = w.op("Add", [h, x], "residual") if residual else h
    w.leave(product(w, operator(w, kind, h, x), "fc"))
    path = folder / "model.onnx"
    onnx.save(written(w), path)
    build_engine(trt, path, BuildSettings("sm89", BatchRange(1, 64, 256)), folder / "engine.trt")
    return [operation.layers for operation in read_compiled_graphs(folder / "engine.trt")[0].operations]


def written(w: GraphWriter) -> onnx.ModelProto:
    """The model at the operator set of RMSNormalization."""
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", WIDTH])
        for name in ("x", "out")
    ]
    graph = onnx.helper.make_graph(w.nodes, "tiny", infos[:1], infos[1:], list(w.initializers.values()))
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=11)


def product(w: GraphWriter, x: str, name: str) -> str:
    inputs = [
        w.quantized(x, f"{name}/x"),
        w.float8_weight(name, (WIDTH, WIDTH)),
        w.constant("b", np.ones(WIDTH)),
    ]
    y = w.op("Gemm", inputs, name, transB=1)
    w.site(name, SiteKind.LINEAR, WIDTH, WIDTH, y)
    return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(RTX.quantized_in_place))
def test_an_operator_and_the_quantization_behind_it_are_one_kernel(kind: str, tmp_path: Path) -> None:
    found = kernels(tmp_path, kind, residual=False)
    quantizing = [layers for layers in found if "fc/x/q" in layers]
    assert len(quantizing) == 1
    # The compiler forgets the name of some operators, but not the bias in front of them.
    assert "fc0" in quantizing[0]
    assert [layers for layers in found if "op" in layers] in ([], quantizing)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(RTX.residual_norms))
def test_a_residual_sum_and_the_norm_behind_it_are_one_kernel(kind: str, tmp_path: Path) -> None:
    found = kernels(tmp_path, kind, residual=True)
    assert any({"fc0", "residual", "op", "fc/x/q"} <= set(layers) for layers in found), found
