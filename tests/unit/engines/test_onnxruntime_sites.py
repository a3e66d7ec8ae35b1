"""What sites really run in: types that ONNX Runtime's own graph has, and the provider of each node."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.core.formats import Precision
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, PlacedNode
from loka_onnx.engines.onnxruntime.site_precision import Graphs, Placement, dump_optimized, site_precision
from loka_onnx.errors import ModelError

ON_CUDA, ON_CPU = CUDA.name, CPU.name


def product_model(folder: Path, kind: str, *, between_casts: bool = False) -> Path:
    """``fc``: x · w of one type, or FP32 between casts as ONNX Runtime runs what it has no kernel for."""
    number, weight = {"float": (1, "f4"), "float16": (10, "f2"), "bfloat16": (16, ml_dtypes.bfloat16)}[kind]
    product = "[fc] p = MatMul(h, w)"
    if between_casts:
        product = "a = Cast<to=1>(h)  c = Cast<to=1>(w) [fc] p = MatMul(a, c)"
    body, constants = f"h = Cast<to={number}>(x) {product} y = Cast<to=1>(p)", {"w": np.ones((4, 2), weight)}
    onnx.save(parsed(body, constants, inputs="float[b,4] x", outputs="float[b,2] y"), folder / "m.onnx")
    return folder / "m.onnx"


def graphs_of(path: Path, *, is_fp32: bool = False) -> Graphs:
    reader = OperandReader(path)
    return Graphs(reader, reader, is_fp32)


def placed(provider: str) -> Placement:
    return Placement(CUDA, [PlacedNode("fc", "MatMul", provider), PlacedNode("", "Cast", ON_CUDA)])


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
def test_a_product_in_the_planned_type_on_the_gpu(kind: str, tmp_path: Path) -> None:
    planned = {"float": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}[kind]
    found = site_precision("fc", planned, graphs_of(product_model(tmp_path, kind)), placed(ON_CUDA))
    assert (found.engaged, found.operands) == (True, (kind, kind))
    graph = "the graph as ONNX Runtime optimized it (BASIC)"
    assert found.evidence == f"MatMul 'fc' of {graph}; on CUDAExecutionProvider"


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (placed(ON_CPU), "MatMul 'fc' runs on CPUExecutionProvider: CUDAExecutionProvider does not take it"),
        (Placement(CUDA, []), "ONNX Runtime does not say which provider runs MatMul 'fc'"),
    ],
)
def test_a_product_elsewhere_is_a_fallback(placement: Placement, said: str, tmp_path: Path) -> None:
    graphs = graphs_of(product_model(tmp_path, "float16"))
    found = site_precision("fc", Precision.FP16, graphs, placement)
    assert (found.engaged, found.evidence) == (False, said)


def test_products_between_casts_are_what_they_multiply(tmp_path: Path) -> None:
    graphs = graphs_of(product_model(tmp_path, "bfloat16", between_casts=True))
    found = site_precision("fc", Precision.BF16, graphs, placed(ON_CUDA))
    assert (found.engaged, found.operands) == (False, ("float", "float"))
    # Its CPU provider has no FP16 MatMul: it casts, and the graph it dumps is what gives that away.
    pytest.importorskip("onnxruntime")
    path = product_model(tmp_path, "float16")
    dump_optimized(path, tmp_path / "optimized.onnx", CPU)
    graphs = Graphs(OperandReader(path), OperandReader(tmp_path / "optimized.onnx"), False)
    assert site_precision("fc", Precision.FP16, graphs_of(path)).engaged
    found = site_precision("fc", Precision.FP16, graphs)
    assert (found.engaged, found.operands) == (False, ("float", "float"))


def test_sites_that_are_gone_or_simulated(tmp_path: Path) -> None:
    graphs = graphs_of(product_model(tmp_path, "float"), is_fp32=True)
    assert site_precision("gone", Precision.FP32, graphs).engaged
    found = site_precision("gone", Precision.FP32, graphs, placed(ON_CUDA))
    assert not found.engaged
    assert found.evidence == "no node of that name in the graph as ONNX Runtime optimized it (BASIC)"
    graphs = graphs_of(product_model(tmp_path, "float"), is_fp32=True)
    found = site_precision("fc", Precision.BF16, graphs, placed(ON_CUDA))
    assert found.engaged
    assert "stands for BF16, run in FP32; on CUDAExecutionProvider" in found.evidence


def test_a_log_says_where_nodes_went() -> None:
    nodes = [PlacedNode(f"n{i}", "MatMul", ON_CUDA) for i in range(3)] + [
        PlacedNode(f"c{i}", "NonZero", ON_CPU) for i in range(25)
    ]
    lines = Placement(CUDA, nodes).describe().splitlines()
    assert lines[:2] == ["25 nodes on CPUExecutionProvider", "3 nodes on CUDAExecutionProvider"]
    assert lines[2] == "not on CUDAExecutionProvider: NonZero 'c0'"
    assert len(lines) == 22


def test_a_model_that_is_refused_says_why(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = onnx.load(product_model(tmp_path, "float"))
    model.graph.node[1].op_type = "Frobnicate"
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=r"ONNX Runtime refuses '.*bad\.onnx' on CPU(?s:.*)Frobnicate"):
        dump_optimized(tmp_path / "bad.onnx", tmp_path / "o.onnx", CPU)
