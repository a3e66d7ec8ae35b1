"""Which sites of a foreign graph run in FP8, told from the graph alone."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.peers.sites import quantized_products, quantized_sites
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.site import Operand, Site, SiteKind


def site(name: str, k: int, n: int, rows: int = 1) -> Site:
    weight = Operand(f"{name}.w", 1, True, 0, (k, n))
    operands = (Operand(f"{name}.x", 0, False, 1, (None, k)), weight)
    return Site(name, SiteKind.LINEAR, "MatMul", operands, f"{name}.y", k, n, rows)


def artifact(*sites: Site) -> ModelArtifact:
    return ModelArtifact(Path("model.onnx"), "", 21, (), (), sites, "")


def graph(*nodes: onnx.NodeProto, weights: tuple[str, ...] = ()) -> onnx.ModelProto:
    """A graph whose weights are FP8, with FP8 and uint8 zero points and one scale."""
    stored = [
        numpy_helper.from_array(np.zeros((), ml_dtypes.float8_e4m3fn), "zero8"),
        numpy_helper.from_array(np.zeros((), np.uint8), "zero_uint8"),
        numpy_helper.from_array(np.ones((), np.float32), "scale"),
        numpy_helper.from_array(np.ones((16, 16), np.float32), "plain"),
        *(numpy_helper.from_array(np.ones((16, 16), ml_dtypes.float8_e4m3fn), name) for name in weights),
    ]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 16])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(list(nodes), "g", [value], [out], stored))


def pair(name: str, source: str, zero: str = "zero8") -> list[onnx.NodeProto]:
    """A Q/DQ pair whose result is ``<name>``."""
    return [
        helper.make_node("QuantizeLinear", [source, "scale", zero], [f"{name}.q"]),
        helper.make_node("DequantizeLinear", [f"{name}.q", "scale", zero], [name]),
    ]


def weight(name: str) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", [name, "scale", "zero8"], [f"{name}.dq"])


def test_both_operands_must_come_from_fp8():
    model = graph(
        *pair("x8", "x"),
        weight("w"),
        helper.make_node("MatMul", ["x8", "w.dq"], ["a"], name="both"),
        helper.make_node("MatMul", ["x", "w.dq"], ["b"], name="weight alone"),
        helper.make_node("MatMul", ["x8", "plain"], ["c"], name="activation alone"),
        helper.make_node("Gemm", ["x8", "w.dq", "plain"], ["y"], name="bias stays wide"),
        weights=("w",),
    )

    assert quantized_products(model) == ("both", "bias stays wide")


def test_movement_is_followed_and_arithmetic_is_not():
    model = graph(
        *pair("x8", "x"),
        weight("w"),
        helper.make_node("Transpose", ["w.dq"], ["w.t"]),
        helper.make_node("Concat", ["x8", "x8"], ["xx"], axis=0),
        helper.make_node("MatMul", ["xx", "w.t"], ["a"], name="moved"),
        helper.make_node("Concat", ["x8", "x"], ["mixed"], axis=0),
        helper.make_node("MatMul", ["mixed", "w.t"], ["b"], name="one part is wide"),
        helper.make_node("Relu", ["x8"], ["r"]),
        helper.make_node("MatMul", ["r", "w.t"], ["y"], name="behind a Relu"),
        weights=("w",),
    )

    assert quantized_products(model) == ("moved",)


def test_the_share_counts_fp8_able_flops_only():
    # 2·64·64 and 2·64·32 operations can be FP8; K = 8 cannot be, though it is quantized here.
    exported = artifact(site("big", 64, 64), site("small", 64, 32), site("narrow", 8, 64))
    model = graph(
        *pair("x8", "x"),
        weight("w"),
        helper.make_node("MatMul", ["x8", "w.dq"], ["a"], name="big"),
        helper.make_node("MatMul", ["x8", "w.dq"], ["b"], name="narrow/MatMulAddFusion"),
        helper.make_node("MatMul", ["x8", "w.dq"], ["y"], name="made by a tool"),
        weights=("w",),
    )

    found = quantized_sites(model, exported)

    assert found.sites == ("big", "narrow")
    assert found.linear_sites == 3
    assert found.share == 64 * 64 / (64 * 64 + 64 * 32)
    assert found.unknown == ("made by a tool",)
    assert found.pairs == 1


def test_a_merged_site_counts_for_those_that_it_replaces():
    exported = artifact(site("query", 64, 64), site("key", 64, 64), site("head", 64, 128))
    model = graph(
        *pair("x8", "x"),
        weight("w"),
        helper.make_node("MatMul", ["x8", "w.dq"], ["y"], name="query+key"),
        weights=("w",),
    )

    found = quantized_sites(model, exported, {"query+key": ["query", "key"]})

    assert found.sites == ("query", "key")
    assert found.share == 0.5
    assert found.unknown == ()
