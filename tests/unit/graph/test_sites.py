"""Sites and their sizes; products that are none, with the operations of each operator by its definition."""

from __future__ import annotations

import re
from math import isclose
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.products import other_products
from loka_onnx.graph.sites import channel_axis, find_sites
from loka_onnx.planning.costs import able_share, useful_flops

# Body of a graph over x, shapes of its weights; then K, N, rows per example and FLOPs per example.
LINEAR = {
    "gemm, W (K, N)": ("float[b,24] x", "y = Gemm(x, w)", (24, 40), (24, 40, 1, 2 * 24 * 40)),
    "gemm, transB, W (N, K)": ("float[b,24] x", "y = Gemm<transB=1>(x, w)", (40, 24), (24, 40, 1, 1920)),
    "gemm, transA, x (K, batch)": ("float[24,b] x", "y = Gemm<transA=1>(x, w)", (24, 40), (24, 40, 1, 1920)),
    "matmul, 2-D": ("float[b,24] x", "y = MatMul(x, w)", (24, 40), (24, 40, 1, 1920)),
    "matmul, 3-D x": ("float[b,7,24] x", "y = MatMul(x, w)", (24, 40), (24, 40, 7, 7 * 1920)),
    "matmul, weight on the left": ("float[b,24,5] x", "y = MatMul(w, x)", (40, 24), (24, 40, 5, 5 * 1920)),
    "matmul, batched weight": ("float[b,3,7,24] x", "y = MatMul(x, w)", (3, 24, 40), (24, 40, 21, 21 * 1920)),
    "matmul, one weight an expert": ("float[3,b,24] x", "y = MatMul(x, w)", (3, 24, 40), (24, 40, 3, 5760)),
    "matmul, W (K,)": ("float[b,24] x", "y = MatMul(x, w)", (24,), (24, 1, 1, 48)),
    "matmul, 3-D x, W (K,)": ("float[b,7,24] x", "y = MatMul(x, w)", (24,), (24, 1, 7, 7 * 48)),
}


@pytest.mark.parametrize("case", LINEAR)
def test_size_of_a_linear_site(case, write_model):
    source, body, shape, (k, n, rows, flops) = LINEAR[case]
    model = GraphModel.load(write_model(f"g ({source}) => (float[] y) {{ {body} }}", {"w": shape}))
    (site,) = find_sites(model)
    assert (site.kind, site.k, site.n, site.rows) == (SiteKind.LINEAR, k, n, rows)
    assert site.flops_per_example == flops
    assert site.is_fp8_able == (n >= 16)
    assert (site.activation.tensor, site.weight.tensor) == ("x", "w")
    assert site.weight.shape == shape
    assert shape[site.weight.contracting_axis] == k
    axis = channel_axis(site.weight)
    assert shape[axis] == n if len(shape) > 1 else axis == 0


@pytest.mark.parametrize(
    ("inputs", "k", "n", "rows"),
    [("float[b,5,8] x, float[b,8,6] z", 8, 6, 5), ("float[b,2,5,8] x, float[b,2,8,6] z", 8, 6, 10)],
)
def test_size_of_an_interaction(inputs, k, n, rows, write_model):
    model = GraphModel.load(write_model(f"g ({inputs}) => (float[] y) {{ y = MatMul(x, z) }}"))
    (site,) = find_sites(model)
    assert (site.kind, site.k, site.n, site.rows) == (SiteKind.INTERACTION, k, n, rows)
    assert site.weight is None and [o.tensor for o in site.operands] == ["x", "z"]
    assert not site.is_fp8_able


@pytest.mark.parametrize(
    ("source", "body", "k", "rows"),
    [
        ("float[b,24] x", "y = LayerNormalization(x, w)", 24, 1),
        ("float[b,7,24] x", "y = LayerNormalization<axis=-1>(x, w)", 24, 7),
        ("float[b,2,24] x", "y = LayerNormalization<axis=1>(x, v)", 48, 1),
        ("float[b,24] x", "y = RMSNormalization(x, w)", 24, 1),
        ("float[b,24] x", "y = GroupNormalization<num_groups=4>(x, w, w)", 6, 4),
        ("float[b,24,5,7] x", "y = GroupNormalization<num_groups=4>(x, w, w)", 6 * 5 * 7, 4),
        ("float[b,24,5,7] x", "y = InstanceNormalization(x, w, w)", 5 * 7, 24),
        ("float[b,7,24] x", "y = LpNormalization(x)", 24, 7),
        ("float[b,7,24] x", "y = LpNormalization<axis=1>(x)", 7, 24),
    ],
)
def test_size_of_a_norm(source, body, k, rows, write_model):
    weights = {"w": (24,), "v": (2, 24)}
    model = GraphModel.load(
        write_model(f"g ({source}) => (float[] y) {{ {body} }}", weights, 23 if "RMS" in body else 21)
    )
    (site,) = find_sites(model)
    assert (site.kind, site.k, site.n, site.rows) == (SiteKind.NORM, k, 0, rows)
    assert site.flops_per_example == 0 and site.weight is None


def test_sites_come_in_topological_order_and_constants_are_none(write_model):
    model = GraphModel.load(
        write_model(
            "g (float[b,4] x) => (float[b,6] y) { c = MatMul(u, v)  y = MatMul(x, c) }",
            {"u": (4, 5), "v": (5, 6)},
        )
    )
    (site,) = find_sites(model)
    # Until the product of the constants is folded, what x meets is no constant.
    assert (site.output, site.kind) == ("y", SiteKind.INTERACTION)
    model = GraphModel.load(
        write_model(
            "g (float[b,4] x) => (float[b,1] y) {"
            " p = MatMul(x, u)  q = MatMul(x, v)  r = Add(p, q)  y = MatMul(r, w) }",
            {"u": (4, 5), "v": (4, 5), "w": (5, 1)},
        )
    )
    sites = find_sites(model, {"": ("a", "b")})
    assert [site.output for site in sites] == ["p", "q", "y"]
    assert [site.activation.tensor for site in sites] == ["x", "x", "r"]
    assert sites[0].merged_from == ("a", "b")


def graph_of(body: str, weights: dict[str, tuple[int, ...]], inputs: str, output: str) -> GraphModel:
    constants = {name: np.ones(shape) for name, shape in weights.items()}
    model = parsed(body, constants, inputs=inputs, outputs=output)
    onnx.checker.check_model(model)
    return GraphModel.from_proto(onnx.shape_inference.infer_shapes(model), Path())


# Operator, weights, inputs, output, and products of one example.
# fmt: off
CASES = {
    # 24 channels at 6 - 3 + 1 positions, each a sum over 16 channels and 3 taps.
    "convolution": ("Conv(x, w)", {"w": (24, 16, 3)}, "float[b,16,6] x", "float[b,24,4] y", 24 * 4 * 48),
    "groups": ("Conv<group=4>(x, w)", {"w": (24, 4, 1)}, "float[b,16,6] x", "float[b,24,6] y", 24 * 6 * 4),
    "pixels": ("Conv(x, w)", {"w": (8, 4, 3, 2)}, "float[b,4,5,5] x", "float[b,8,3,4] y", 8 * 12 * 4 * 6),
    # Each of 16 · 6 inputs meets 8 channels and 2 taps.
    "transposed": ("ConvTranspose(x, w)", {"w": (16, 8, 2)}, "float[b,16,6] x", "float[b,8,7] y", 96 * 16),
    "einsum": ('Einsum<equation="bnd,bme->bnm">(x, x)', {}, "float[b,4,8] x", "float[b,4,4] y", 4**2 * 8**2),
    # 5 steps; 4 gates of 3 read 7 inputs and 3 states.
    "lstm": ("LSTM<hidden_size=3>(x, w, r)", {"w": (1, 12, 7), "r": (1, 12, 3)},
             "float[5,b,7] x", "float[5,1,b,3] y", 5 * 12 * 10),
    "gru both ways": ('GRU<hidden_size=3, direction="bidirectional">(x, w, r)',
                      {"w": (2, 9, 7), "r": (2, 9, 3)}, "float[5,b,7] x", "float[5,2,b,3] y", 5 * 2 * 9 * 10),
    "integers": ("MatMulInteger(x, v)", {}, "uint8[b,8] x, uint8[8,3] v", "int32[b,3] y", 8 * 3),
    "any length": ("Conv(x, w)", {"w": (24, 16, 3)}, "float[b,16,l] x", "float[b,24,m] y", None),
    "any steps": ("RNN<hidden_size=3>(x, w, r)", {"w": (1, 3, 7), "r": (1, 3, 3)},
                  "float[t,b,7] x", "float[t,1,b,3] y", None),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_operations_of_one_example(case: str) -> None:
    operator, weights, inputs, output, products = CASES[case]
    (found,) = other_products(graph_of(f"[n] y = {operator}", weights, inputs, output))
    assert (found.name, found.op_type) == ("n", re.match(r"\w+", operator)[0])
    assert found.flops_per_example == (None if products is None else 2 * products)
    assert found.reason


def test_branches_count_and_sites_do_not() -> None:
    graph = graph_of(
        "[s] h = MatMul(x, w) [choice] y = If (c) <"
        "then_branch = t () => (float[b,3] p) { [in_then] p = MatMul(h, v) },"
        "else_branch = e () => (float[b,3] q) { [in_else] q = MatMul(h, v) }>",
        {"w": (8, 4), "v": (4, 3)},
        "float[b,8] x, bool c",
        "float[b,3] y",
    )
    assert [site.name for site in find_sites(graph)] == ["s"]
    found = other_products(graph)
    assert [(each.name, each.op_type, each.reason) for each in found] == [
        ("in_then", "MatMul", "inside of If 'choice'"),
        ("in_else", "MatMul", "inside of If 'choice'"),
    ]
    assert {each.flops_per_example for each in found} <= {2 * 4 * 3, None}


def test_a_share_of_all_products_counts_what_is_no_site() -> None:
    """Half of the operations are a convolution's: what FP8 can have is the other half."""
    graph = graph_of(
        "[c] h = Conv(x, k) f = Flatten(h) [fc] y = MatMul(f, w)",
        {"k": (16, 16, 3), "w": (64, 48)},
        "float[b,16,6] x",
        "float[b,48] y",
    )
    model = ModelArtifact(
        Path(), "", 21, (), (), find_sites(graph), "test", other_products=other_products(graph)
    )
    assert (model.fp8_able_flops, model.product_flops) == (2 * 64 * 48, 4 * 64 * 48)
    (site,) = model.sites
    assert isclose(able_share(model, useful_flops(graph, site)), 0.5)
