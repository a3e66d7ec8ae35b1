"""Sites of small graphs against K, N, rows and operations counted by hand."""

from __future__ import annotations

import pytest

from loka_onnx.core.site import SiteKind
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import channel_axis, find_sites

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
