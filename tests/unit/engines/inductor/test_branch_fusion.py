"""Branches of one form become batched products that compute the same, to the bit where sums are exact."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import BF16, Model, fused, ops, run, sites_of, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st

FUSION = "stacked-branches"
STEPS = {
    "relu": "Relu({0})",
    "row": "Add({0}, r{1})",
    "shared": "Mul({0}, two)",
    "mean": "ReduceSum<keepdims=1>({0}, last)",
    "of_all": "Sub({0}, g)",
    "twice": "Add({0}, {0})",
    "max": "Max({0}, r{1})",
}
"""Steps of a branch; Max is not followed."""


def small(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers, of which sums and products here are exact in BF16."""
    return np.random.default_rng([seed, *shape]).integers(-1, 2, size=shape).astype(BF16)


def branches(count: int, steps: list[str], split: bool, gemm: bool, join: bool) -> Model:
    """`count` branches of two products with steps between them, whose results are joined or summed."""
    constants = {"two": np.array(2, BF16), "last": np.array([-1]), "g_w": small(4 * count, 1, seed=9)}
    text = "[shared] g = MatMul(x, g_w)"
    if split:
        constants["sizes"] = np.full(count, 4)
        text += f" {', '.join(f's{i}' for i in range(count))} = Split<axis=-1>(x, sizes)"
    for i in range(count):
        constants |= {f"r{i}": small(1, seed=i), f"p{i}": small(4 * count, 4, seed=20 + i)}
        constants |= {f"w{i}": small(4, 4, seed=i), f"b{i}": small(4, seed=i), f"v{i}": small(4, 2, seed=i)}
        text += "" if split else f" [in{i}] p{i}x = MatMul(x, p{i}) s{i} = Relu(p{i}x)"
        text += f" [a{i}] t{i}_0 = " + (f"Gemm(s{i}, w{i}, b{i})" if gemm else f"MatMul(s{i}, w{i})")
        for j, step in enumerate(steps):
            text += f" t{i}_{j + 1} = {STEPS[step].format(f't{i}_{j}', i)}"
        wide = f"t{i}_{len(steps)}" if "mean" not in steps else f"e{i}"
        text += f" e{i} = Mul(t{i}_0, t{i}_{len(steps)})" if "mean" in steps else ""
        text += f" [c{i}] y{i} = MatMul({wide}, v{i})"
    ends = ", ".join(f"y{i}" for i in range(count))
    text += f" y = Concat<axis=1>({ends})" if join else f" y = Sum({ends})"
    return Model((4 * count,), text, constants)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from(sorted(STEPS)), max_size=2, unique=True),
    *(st.booleans(),) * 4,
)
def test_random_branches_compute_the_same_bits(count, steps, split, gemm, join, tail):
    model = branches(count, steps, split, gemm, join)
    # Something else may read a result inside of a branch.
    model = model.then("", "y", "t1_0") if tail else model
    with TemporaryDirectory() as folder:
        graph, report = fused(model, Path(folder))
        x = np.random.default_rng(count).integers(-1, 2, size=(5, *model.width)).astype(np.float32)
        for found, expected in zip(run(graph, x), run(Path(folder) / "planned.onnx", x), strict=True):
            np.testing.assert_array_equal(found, expected)
    if "max" not in steps:
        sites = {f"{name}{i}" for name in "ac" for i in range(count)}
        assert sites in [{*each} for each in sites_of(report, FUSION)]


def test_experts_of_a_merged_product_are_one_batched_product(tmp_path):
    """DeepCTR-Torch's MMOE: experts and gates of one Split; experts are stacked on a new axis."""
    text = (
        "[first] h = MatMul(x, w) r = Relu(h) a, b, c, d = Split<axis=-1>(r, sizes)"
        " [e0] ea = Gemm<transB=1>(a, wa, ba) [e1] eb = Gemm<transB=1>(b, wb, bb) ra = Relu(ea) rb = Relu(eb)"
        " ua = Unsqueeze(ra, one) ub = Unsqueeze(rb, one) s = Concat<axis=1>(ua, ub)"
        " [g0] gc = MatMul(c, wc) [g1] gd = MatMul(d, wd) pc = Softmax(gc) pd = Softmax(gd)"
        " mc = Unsqueeze(pc, one) md = Unsqueeze(pd, one) yc = MatMul(mc, s) yd = MatMul(md, s)"
        " y = Add(yc, yd)"
    )
    sides = {"w": (8, 40), "wa": (6, 16), "wb": (6, 16), "ba": (6,), "bb": (6,), "wc": (4, 2), "wd": (4, 2)}
    constants = {name: small(*shape, seed=i) for i, (name, shape) in enumerate(sides.items())}
    model = Model((8,), text, constants | {"sizes": np.array([16, 16, 4, 4]), "one": np.array([1])})
    report = unchanged(model, tmp_path)
    assert sites_of(report, FUSION) == [("e0", "e1"), ("g0", "g1")]
    # The Concat is a view of the batched product's result.
    assert "Concat" not in ops(fused(model, tmp_path)[0])


TWO = "[a] ha = MatMul(sa, wa) [b] hb = MatMul(sb, wb)"
SOURCES = "[fa] fa = MatMul(x, va) [fb] fb = MatMul(x, vb) sa = Relu(fa) sb = Relu(fb)"
TOWERS = " ta = Tanh(ha) tb = Tanh(hb) [c] ya = MatMul(ta, ca) [d] yb = MatMul(tb, cb) y = Add(ya, yb)"
WEIGHTS = {name: small(8, 8, seed=i) for i, name in enumerate(("wa", "wb", "va", "vb", "ca", "cb"))}


def test_branches_that_are_not_alike_stay(tmp_path):
    """Another shape, an own activation, one result read by the other, one product only, or a large weight."""
    model = Model((8,), SOURCES + " " + TWO + TOWERS, WEIGHTS)
    (sites,) = sites_of(unchanged(model, tmp_path), FUSION)
    assert {*sites} == {"a", "b", "c", "d"}
    others = (
        model.but("tb = Tanh(hb)", "tb = Sigmoid(hb)"),
        model.but("sb = Relu(fb)", "sb = Add(fb, ha)"),
        model.but("Tanh(ha)", "Add(ha, hb)"),
        Model((8,), f"{SOURCES} {TWO} y = Mul(ha, hb)", WEIGHTS),
        model.but("ta = Tanh(ha)", "ta = LeakyRelu<alpha=0.5>(ha)"),
        model.but("sb = Relu(fb)", "sb = Tanh(fb)"),
        model.but("hb = MatMul(sb, wb)", "hb = MatMul(sb, square)").but(
            "sb = Relu", "turned = Transpose<perm=[1, 0]>(x) square = MatMul(turned, x) sb = Relu"
        ),
    )
    for number, other in enumerate(others):
        assert sites_of(unchanged(other, tmp_path), FUSION) == [], number
    large = {name: np.zeros((512, 512), BF16) for name in WEIGHTS}
    assert sites_of(unchanged(Model((512,), model.text, large), tmp_path), FUSION) == []


def test_axes_are_those_of_each_branch(tmp_path):
    """Unsqueeze at other positions, as of the two sides of a bilinear head, ends the branches."""
    ends = (
        " [c] ca2 = MatMul(ta, ca) [d] cb2 = MatMul(tb, cb) ua = Unsqueeze(ca2, one) ub = Unsqueeze(cb2, two)"
    )
    head = TOWERS.replace("[c] ya = MatMul(ta, ca) [d] yb = MatMul(tb, cb) y = Add(ya, yb)", "")
    text = f"{SOURCES} {TWO}{head}{ends} y = MatMul(ua, ub)"
    model = Model((8,), text, WEIGHTS | {"one": np.array([1]), "two": np.array([2])})
    assert len(sites_of(unchanged(model, tmp_path), FUSION)) == 1
