"""FP8 products against float64 products of the values that were quantized; Q and DQ against ml_dtypes."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import Array, Case, Fixed, exported, lowered, reference, run  # noqa: E402
from onnx_text import parsed  # noqa: E402

from loka_onnx.core.formats import E4M3FN, E5M2, INT8, NumberFormat  # noqa: E402
from loka_onnx.engines.inductor.lowering.strategies import (  # noqa: E402
    Epilogue,
    Factors,
    Multiplied,
    PerSite,
    ProductStrategy,
    ScaledMatMul,
)
from loka_onnx.engines.inductor.site_precision import products_of  # noqa: E402
from loka_onnx.errors import EngineError  # noqa: E402
from loka_onnx.numerics.rounding import dequantize, fake_quantize, quantize, storage_type  # noqa: E402

RANDOM = np.random.default_rng(0)
E4M3, STORED_E5M2 = storage_type(E4M3FN), storage_type(E5M2)
ZERO = np.zeros((), E4M3)
X_SCALE, W_SCALE = np.float32(0.0087890625), np.float32(0.00177001953125)
"""They are BF16 numbers, as the scales of plans are."""


@dataclass(frozen=True)
class Watch(ProductStrategy):
    seen: list[Factors] = field(default_factory=list)

    def multiply(self, product: Factors, epilogue: Epilogue | None = None) -> Multiplied:
        self.seen.append(product)
        return ScaledMatMul().multiply(product, epilogue)


# Products ---------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A product of a quantized activation and an FP8 weight of some shapes.

    The nodes of `text` lead from ``xd`` (the dequantized activation), ``wd`` (the weight) and ``c`` to ``y``;
    the product is the node ``[fc]``. `formula` is the same product as einsum of both, over k.
    """

    text: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    formula: str


MATMUL = "[fc] y = MatMul(xd, wd)"
MOVED = (
    "t = Transpose<perm=[0,2,1]>(xd) u = Unsqueeze(t, first) s = Squeeze(u, first) i = Identity(s)"
    " a, b = Split<axis=1>(i, sizes) j = Concat<axis=1>(b, a) [fc] y = MatMul(j, wd)"
)
TURNED = "t = Transpose<perm=[1,0]>(wd) [fc] y = MatMul(xd, t)"
PRODUCTS = {
    "matmul": Product(MATMUL, (5, 32), (32, 48), "mk,kn->mn"),
    "gemm": Product("[fc] y = Gemm<transB=1>(xd, wd, c)", (5, 32), (48, 32), "mk,nk->mn"),
    "gemm, columns": Product("[fc] y = Gemm(xd, wd, c)", (5, 32), (32, 48), "mk,kn->mn"),
    "stack": Product(MATMUL, (5, 3, 32), (32, 48), "bmk,kn->bmn"),
    "stack of stacks": Product(MATMUL, (5, 2, 3, 32), (32, 48), "abmk,kn->abmn"),
    "transposed weight": Product(TURNED, (5, 32), (48, 32), "mk,nk->mn"),
    "moved": Product(MOVED, (5, 32, 4), (32, 48), "bkm,kn->bmn"),
    "left weight": Product("[fc] y = MatMul(wd, xd)", (5, 32, 7), (48, 32), "bkn,mk->bmn"),
}


def product_model(
    product: Product, kind: Any, *, per_channel: bool, format: NumberFormat = E4M3FN
) -> tuple[onnx.ModelProto, Array, Array]:
    """The graph in a base type, and both factors after Q/DQ in float64."""
    x = RANDOM.normal(size=product.x).astype(np.float32)
    w = RANDOM.normal(size=product.w).astype(np.float32) / np.sqrt(32)
    scale: Any = W_SCALE
    axis = 1 - product.formula.split("->")[0].split(",")[1].index("k") if per_channel else None
    if axis is not None:
        scale = np.linspace(0.001, 0.004, product.w[axis]).astype(kind).astype(np.float32)
    if format is INT8:
        scale = scale * 8
    stored = quantize(w, scale, format, axis)
    # Casts to FP32 do nothing there.
    base = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    attribute = f"<axis={axis}>" if per_channel else ""
    text = (
        f"xb = Cast<to={base}>(x) xq = QuantizeLinear(xb, sx, z) xd = DequantizeLinear(xq, sx, z) "
        f"wd = DequantizeLinear{attribute}(w8, sw, zw) {product.text} out = Cast<to=1>(y)"
    )
    constants = {
        **{"sx": np.array(X_SCALE).astype(kind), "sw": np.asarray(scale).astype(kind), "w8": stored},
        **{"z": np.zeros((), storage_type(format)), "zw": np.zeros(np.shape(scale), storage_type(format))},
        **{"first": np.array([0]), "sizes": np.array([1, 3]), "c": RANDOM.normal(size=48).astype(kind)},
    }
    free = ",".join(product.formula.split("->")[1])
    lengths = ",".join(["batch", *map(str, product.x[1:])])
    proto = parsed(text, constants, inputs=f"float[{lengths}] x", outputs=f"float[{free}] out")
    rounded = x.astype(kind).astype(np.float32)
    wide = dequantize(quantize(rounded, X_SCALE, format), X_SCALE).astype(np.float64)
    expected = np.einsum(product.formula, wide, dequantize(stored, scale, axis).astype(np.float64))
    if "Concat" in product.text:
        expected = np.concatenate([expected[:, 1:], expected[:, :1]], axis=1)
    if "(xd, wd, c)" in product.text:
        expected = expected + constants["c"].astype(np.float64)
    return proto, x, expected


@pytest.mark.parametrize("format", [E4M3FN, INT8], ids=str)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_eight_bits_multiply_them(name, kind, per_channel, format, tmp_path):
    proto, x, expected = product_model(PRODUCTS[name], kind, per_channel=per_channel, format=format)
    model = lowered(proto, tmp_path)
    found = run(model, {"x": x})[0]
    site = model.sites["fc"]
    assert (site.kernel, site.engaged) == ("simulated", True), site.reason
    assert site.operands == (format.storage,) * 2
    assert site.reason == ("weight on the left: the transposed product is computed" if "left" in name else "")
    scales = [value for key, value in model.named_buffers() if key in {"weights.sx", "weights.sw"}]
    assert [value.dtype for value in scales] == [torch.float32] * 2
    # FP32 sums of 32 exact products, and three multiplications; or rounding to BF16 (2⁻⁹), and once more
    # behind a bias.
    relative, absolute = (0, 3e-6) if kind is np.float32 else (2**-8, 2**-8)
    np.testing.assert_allclose(found, expected, rtol=relative, atol=absolute * np.abs(expected).max())


@pytest.mark.parametrize("name", ["matmul", "gemm", "transposed weight", "left weight"])
def test_a_weight_is_stored_once_with_its_columns_contiguous(name, tmp_path):
    proto, x, _ = product_model(PRODUCTS[name], np.float32, per_channel=False)
    watch = Watch()
    model = lowered(proto, tmp_path, watch)
    run(model, {"x": x})
    matrices = [value for value in model.buffers() if value.dim() == 2]
    assert [(value.dtype, value.numel()) for value in matrices] == [(torch.float8_e4m3fn, 32 * 48)]
    assert matrices[0].is_contiguous()
    weight = watch.seen[0].a.t() if name == "left weight" else watch.seen[0].b
    assert (weight.stride(), tuple(weight.shape)) == ((1, 32), (32, 48))
    assert weight.data_ptr() == matrices[0].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_a_gpu(name, kind, per_channel, fast, tmp_path):
    proto, x, expected = product_model(PRODUCTS[name], kind, per_channel=per_channel)
    model = lowered(proto, tmp_path, ScaledMatMul(fast_accumulation=fast)).to("cuda")
    with torch.no_grad():
        tensors = (torch.from_numpy(x).cuda(),)
        found = model(*tensors)[0].double().cpu().numpy()
        batch = torch.export.Dim("batch", min=1, max=4096)
        program = torch.export.export(model, tensors, dynamic_shapes=model.dynamic_shapes(batch))
        traced = program.module()(*tensors)[0].double().cpu().numpy()
    assert model.sites["fc"].engaged
    # A tensor core of Hopper aligns the products of an instruction to about 14 bits before it adds them.
    atol = (2**-8 if kind is ml_dtypes.bfloat16 else 2**-10) * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=atol)
    np.testing.assert_array_equal(traced, found)


# Not engaged, and why ---------------------------------------------------------------------------------

REFUSED = {
    "K 20 and N 48 are not both multiples of 16": Product(MATMUL, (5, 20), (20, 48), "mk,kn->mn"),
    "K 32 and N 8 are not both multiples of 16": Product(MATMUL, (5, 32), (32, 8), "mk,kn->mn"),
    "torch._scaled_mm multiplies by a matrix, these factors have ranks 3 and 3": Product(
        "u = Unsqueeze(wd, first) [fc] y = MatMul(xd, u)", (5, 3, 32), (32, 48), "bmk,kn->bmn"
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_product_that_scaled_mm_refuses_is_multiplied_in_floats(reason, tmp_path):
    proto, x, expected = product_model(REFUSED[reason], np.float32, per_channel=False)
    model = lowered(proto, tmp_path)
    found = run(model, {"x": x})[0]
    site = model.sites["fc"]
    assert (site.kernel, site.engaged, site.reason) == ("dequantized", False, reason)
    assert site.operands == ("float32", "float32")
    np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("[fc] y = MatMul(x, wd)", "x"),
        ("r = Relu(xd) [fc] y = MatMul(r, wd)", "r"),
        ("j = Concat<axis=1>(xd, other) a = Slice(j, n0, n32, n1) [fc] y = MatMul(a, wd)", "a"),
        ("[fc] y = MatMul(x, w)", ""),
    ],
)
def test_a_factor_that_is_not_quantized_is_told(text, wide, tmp_path):
    w = RANDOM.normal(size=(32, 48)).astype(np.float32)
    stored = quantize(w, W_SCALE, E4M3FN)
    proto = parsed(
        "xq = QuantizeLinear(x, sx, z) xd = DequantizeLinear(xq, sx, z) wd = DequantizeLinear(w8, sw, z)"
        f" oq = QuantizeLinear(x, so, z) other = DequantizeLinear(oq, so, z) {text}",
        {
            **{"sx": X_SCALE, "sw": W_SCALE, "so": 2 * X_SCALE, "z": ZERO, "w8": stored, "w": w},
            **{f"n{n}": np.array([n]) for n in (0, 1, 32)},
        },
        inputs="float[batch,32] x",
    )
    model = lowered(proto, tmp_path)
    x = RANDOM.normal(size=(4, 32)).astype(np.float32)
    found = run(model, {"x": x})[0]
    done = model.sites["fc"]
    reason = f"eight bits of one factor only: '{wide}' is not quantized" if wide else ""
    assert (done.kernel, done.engaged, done.reason) == ("dequantized" if wide else "dense", False, reason)
    np.testing.assert_allclose(found, reference(proto, {"x": x})[0], atol=2e-5)


def identity_product(text: str, scale: Any) -> onnx.ModelProto:
    """Products of ``d``, a quantized x, and ``v``, the identity in FP8."""
    return parsed(
        f"q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w8, one, z) {text}",
        {"s": np.float32(scale), "one": np.float32(1), "z": ZERO, "w8": np.eye(32).astype(E4M3)},
        inputs="float[batch,32] x",
    )


def test_readers_beside_the_product_nan_and_infinity(tmp_path):
    model = lowered(identity_product("[fc] h = MatMul(d, v) y = Add(h, d)", X_SCALE), tmp_path)
    x = RANDOM.normal(size=(4, 32)).astype(np.float32)
    expected = 2 * fake_quantize(x, X_SCALE, E4M3FN)
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, rtol=1e-6)
    assert model.sites["fc"].engaged
    x = np.zeros((3, 32), np.float32)
    x[0, 3], x[1, 4] = np.nan, -np.inf
    found = run(lowered(identity_product("y = MatMul(d, v)", 0.5), tmp_path), {"x": x})[0]
    assert np.isnan(found[0]).all()
    assert found[1, 4] == -224.0
    assert not found[2].any()


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        (STORED_E5M2, E4M3, ""),
        (STORED_E5M2, STORED_E5M2, "torch._scaled_mm does not multiply float8_e5m2 by float8_e5m2"),
    ],
)
def test_formats_that_can_be_multiplied(left, right, reason, tmp_path):
    w = (RANDOM.normal(size=(32, 48)) * 8).astype(right)
    proto = parsed(
        "q = QuantizeLinear(x, s, zl) d = DequantizeLinear(q, s, zl) v = DequantizeLinear(w8, s, zr)"
        " [fc] y = MatMul(d, v)",
        {"s": X_SCALE, "zl": np.zeros((), left), "zr": np.zeros((), right), "w8": w},
        inputs="float[batch,32] x",
    )
    x = RANDOM.normal(size=(5, 32)).astype(np.float32)
    model = lowered(proto, tmp_path)
    found = run(model, {"x": x})[0]
    wide = dequantize(quantize(x, X_SCALE, E5M2), X_SCALE).astype(np.float64)
    expected = wide @ (w.astype(np.float64) * X_SCALE)
    np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())
    assert (model.sites["fc"].engaged, model.sites["fc"].reason) == (not reason, reason)


# Strategies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_wise", [True, False])
def test_the_cpu_multiplies_float8_values_in_fp32(row_wise, tmp_path, monkeypatch):
    """`torch._scaled_mm` fails on some CPUs. Row-wise scales are for CUDA, but the CPU takes them as well."""
    if row_wise:
        monkeypatch.setattr(ScaledMatMul, "_is_row_wise", lambda self, product: True)
    proto, x, expected = product_model(PRODUCTS["gemm"], ml_dtypes.bfloat16, per_channel=True)
    model = lowered(proto, tmp_path)
    graph = exported(model, {"x": x}).graph
    assert not [node for node in graph.nodes if "_scaled_mm" in str(node.target)]
    assert [product.operands for product in products_of(graph)] == [("float8_e4m3fn",) * 2]
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, rtol=2**-8, atol=2**-8)


def test_a_site_may_have_a_strategy_of_its_own(tmp_path):
    watch = Watch()
    text = "[left] a = MatMul(d, v) [right] b = MatMul(d, v) y = Add(a, b)"
    model = lowered(identity_product(text, 1), tmp_path, PerSite({"right": watch}, ScaledMatMul()))
    x = np.ones((2, 32), np.float32)
    np.testing.assert_array_equal(run(model, {"x": x})[0], 2 * x)
    assert [each.site for each in watch.seen] == ["right"]


# QuantizeLinear and DequantizeLinear ------------------------------------------------------------------


def corners(format: NumberFormat, scale: np.float32) -> Array:
    """Every FP8 number, the middle of each two (a tie), their neighbours, and what lies beyond."""
    every = np.arange(256).astype(np.uint8).view(storage_type(format)).astype(np.float64)
    finite = np.unique(every[np.isfinite(every)])
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(sign) * np.inf) for sign in (-1, 1)]
    beyond = np.array([-np.inf, np.inf, np.nan, -1e30, 1e30, -0.0, 1e-30], np.float32)
    values = np.concatenate([finite.astype(np.float32), middles, *around, beyond])
    return (values * scale).astype(np.float32)


@pytest.mark.parametrize("format", [E4M3FN, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.0087890625, 3e-5])
def test_quantizing_is_that_of_ml_dtypes_bit_for_bit(format, scale, tmp_path):
    factor, zero = np.float32(scale), np.zeros((), storage_type(format))
    case = Case("QuantizeLinear", [corners(format, factor), Fixed(factor), Fixed(zero)])
    found = run(lowered(case.model(), tmp_path), case.feeds)[0]
    expected = quantize(case.feeds["i0"], float(factor), format)
    assert found.dtype == expected.dtype
    is_number = ~np.isnan(expected.astype(np.float32))
    assert is_number.sum() > 500
    np.testing.assert_array_equal(found.view(np.uint8)[is_number], expected.view(np.uint8)[is_number])
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), ~is_number)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scales_along_an_axis(axis, tmp_path):
    x = RANDOM.normal(size=(3, 4, 5)).astype(np.float32) * 10
    scale = np.linspace(0.01, 0.2, x.shape[axis]).astype(np.float32)
    zero = np.zeros(scale.shape, E4M3)
    proto = parsed(
        f"q = QuantizeLinear<axis={axis}>(x, s, z) y = DequantizeLinear<axis={axis}>(q, s, z)",
        {"s": scale, "z": zero},
        inputs="float[a,b,c] x",
    )
    found = run(lowered(proto, tmp_path), {"x": x})[0]
    np.testing.assert_array_equal(found, fake_quantize(x, scale, E4M3FN, axis % 3))


def test_the_type_may_be_an_attribute(tmp_path):
    x = corners(E5M2, np.float32(1))[:40]
    attributes = {"output_dtype": onnx.TensorProto.FLOAT8E5M2}
    case = Case("QuantizeLinear", [x, Fixed(np.float32(0.5))], attributes)
    found = run(lowered(case.model(), tmp_path), case.feeds)[0]
    np.testing.assert_array_equal(found, quantize(x, 0.5, E5M2))


@pytest.mark.parametrize(
    ("zero", "attributes", "said"),
    [
        (np.zeros((), ml_dtypes.float8_e4m3fnuz), {}, "values of type FLOAT8E4M3FNUZ are not lowered"),
        (ZERO, {"saturate": 0}, "FP8 without saturation is not lowered"),
        (np.ones((), E4M3), {}, "the zero point of an FP8 tensor must be 0"),
    ],
)
def test_what_is_declined(zero, attributes, said, tmp_path):
    case = Case("QuantizeLinear", [np.ones(3, np.float32), Fixed(np.float32(1)), Fixed(zero)], attributes)
    with pytest.raises(EngineError, match=said) as caught:
        run(lowered(case.model(), tmp_path), case.feeds)
    assert "let another backend build this model" in str(caught.value)
