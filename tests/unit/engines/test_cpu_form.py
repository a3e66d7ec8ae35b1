"""Models in the form that ONNX Runtime's CPU provider runs fastest: the same values, other kernels."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.cpu_form import (
    SplitProducts,
    write_convolutions,
    write_norm_sums,
    write_outer_products,
)
from loka_onnx.engines.onnxruntime.providers import CPU
from loka_onnx.engines.onnxruntime.site_precision import dump_optimized
from loka_onnx.sessions.onnx_session import OnnxSession

pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")

X = "float[batch,16,6] x"
QUANTIZED = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) [fc] y = MatMul(w, d)"
CASES = {
    "alone": ("[fc] y = MatMul(w, x)", X, ["Conv"]),
    "with a bias": ("[fc] h = MatMul(w, x) y = Add(h, b)", X, ["Conv"]),
    "with a bias in front": ("[fc] h = MatMul(w, x) g = Add(b, h) y = Relu(g)", X, ["Conv", "Relu"]),
    "with a row for a bias": ("[fc] h = MatMul(w, x) y = Add(h, r)", X, ["Conv", "Add"]),
    "a bias read twice": ("[fc] h = MatMul(w, x) g = Add(h, b) y = Mul(g, b)", X, ["Conv", "Add", "Mul"]),
    "a product read twice": ("[fc] h = MatMul(w, x) g = Add(h, b) y = Mul(g, h)", X, ["Conv", "Add", "Mul"]),
    # Left as they are.
    "a shared weight": ("g = MatMul(w, x) h = MatMul(w, x) y = Add(g, h)", X, ["MatMul", "MatMul", "Add"]),
    "heads": ("[fc] y = MatMul(w, x)", "float[batch,2,16,6] x", ["MatMul"]),
    "no batch": ("[fc] y = MatMul(w, x)", "float[16,batch] x", ["MatMul"]),
    "fp8": (QUANTIZED, X, ["QuantizeLinear", "DequantizeLinear", "MatMul"]),
}


def write(folder: Path, body: str, entry: str) -> Path:
    """The model with its weights beside it."""
    shape = entry.removeprefix("float[").removesuffix("] x").split(",")
    result = ",".join([*shape[:-2], "24", shape[-1]])
    random = np.random.default_rng(0)
    shapes = {"w": (24, 16), "b": (24, 1), "r": (24, 6)}
    constants = {name: random.normal(size=shape) for name, shape in shapes.items()}
    constants |= {"s": np.array(0.1), "z": np.array(0, np.uint8)}
    model = parsed(body, constants, inputs=entry, outputs=f"float[{result}] y")
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=64)
    return folder / "m.onnx"


@pytest.mark.parametrize("case", CASES)
def test_products_with_a_weight_on_the_left(case: str, tmp_path: Path) -> None:
    body, entry, operators = CASES[case]
    before, after = write(tmp_path, body, entry), tmp_path / "after.onnx"
    data = (tmp_path / "w.bin").read_bytes()
    model = onnx.load(before, load_external_data=False)
    assert write_convolutions(model) == operators.count("Conv")
    onnx.save(model, after)
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in model.graph.node] == operators
    shape = {"heads": (5, 2, 16, 6), "no batch": (16, 6)}.get(case, (5, 16, 6))
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    expected, found = (OnnxSession(path).run({"x": x})["y"] for path in (before, after))
    # Sums of 16 products of up to 10, rounded 16 times to 2⁻²⁴ of it, in another order.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert (tmp_path / "w.bin").read_bytes() == data
    if "Conv" in operators:
        node = OperandReader(after).product("fc")
        assert node is not None
        assert [source.describe() for source in OperandReader(after).operands(node)] == ["float", "float"]


def test_a_sum_and_its_norm_stay_two_nodes(tmp_path: Path) -> None:
    body = "s = Add(x, z) y = LayerNormalization(s, gain) other = Add(y, z)"
    shape = "float[b,4,32]"
    ends = {"inputs": f"{shape} x, {shape} z", "outputs": f"{shape} y, {shape} other"}
    model = parsed(body, {"gain": np.full(32, 1.5)}, **ends)
    path, written = tmp_path / "m.onnx", tmp_path / "w.onnx"
    onnx.save(model, path)
    assert (write_norm_sums(model), write_norm_sums(model)) == (1, 0)
    onnx.save(model, written)
    for file, norm in ((path, "SkipLayerNormalization"), (written, "LayerNormalization")):
        dump_optimized(file, tmp_path / "o.onnx", CPU, keeps_float8=False)
        assert norm in {node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node}
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((5, 4, 32)).astype(np.float32) for name in "xz"}
    before, after = (OnnxSession(file).run(inputs) for file in (path, written))
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, atol=2e-6)


OUTER = {
    "a row": ("y = Mul(x, w)", (5, 1), ["MatMul"]),
    "a row in front, and a bias": ("h = Mul(w, x) y = Add(h, b)", (5, 1), ["Gemm"]),
    "a history": ("y = Mul(x, w)", (5, 3, 1), ["MatMul"]),
    # Left as they are.
    "no column": ("y = Mul(x, w)", (5, 6), ["Mul"]),
    "a row read twice": ("h = Mul(x, w) y = Sub(h, w)", (5, 1), ["Mul", "Sub"]),
    "one value": ("h = Mul(x, one) y = Sub(h, b)", (5, 1), ["Mul", "Sub"]),
    "no constant": ("h = Mul(x, x) y = Sub(h, b)", (5, 1), ["Mul", "Sub"]),
    "a single axis": ("y = Mul(x, w)", (1,), ["Mul"]),
}


@pytest.mark.parametrize("case", OUTER)
def test_a_column_times_a_row_is_a_product(case: str, tmp_path: Path) -> None:
    body, shape, operators = OUTER[case]
    axes = ["batch", *map(str, shape[1:])] if len(shape) > 1 else ["1"]
    ends = {"inputs": f"float[{','.join(axes)}] x", "outputs": f"float[{','.join([*axes[:-1], '6'])}] y"}
    constants = {"w": np.arange(1.0, 7.0), "b": np.ones(6), "one": np.full(1, 2.0)}
    model = parsed(body, constants, **ends)
    path, written, optimized = (tmp_path / f"{name}.onnx" for name in ("m", "w", "o"))
    onnx.save(model, path)
    assert write_outer_products(model) == ("Mul" not in operators)
    onnx.save(model, written)
    onnx.checker.check_model(written, full_check=True)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    expected, got = (OnnxSession(file).run({"x": x})["y"] for file in (path, written))
    # A product by 6 at most, and a sum, each rounded to 2⁻²⁴ of it.
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)
    dump_optimized(written, optimized, CPU, keeps_float8=False)
    assert [node.op_type for node in onnx.load(optimized).graph.node] == operators


SPLITS = {
    "alone": ("[fc] h = MatMul(x, w)", 1),
    "a bias": ("[fc] h = Gemm(x, w, b)", 1),
    "an add": ("[fc] g = MatMul(x, w) h = Add(r, g)", 1),
    "an add of one value": ("[fc] g = MatMul(x, w) h = Add(g, v)", 1),
    "transposed": ("[fc] h = Gemm<transB = 1>(x, m, b)", 1),
    "an epilogue": ("[fc] g = Gemm(x, w, b) h = Relu(g)", 1),
    "an epilogue of channels": ("[fc] g = MatMul(x, w) k = Sub(r, g) i = Mul(k, b) h = PRelu(i, r)", 1),
    "an epilogue with limits": ("[fc] g = Gemm(x, w) h = Clip(g, , one)", 1),
    # Left as they are.
    "rows": ("[fc] h = Gemm(x, w, rows)", 0),
    "read twice": ("[fc] h = MatMul(x, w) other = Relu(h)", 0),
    "an epilogue read twice": ("[fc] g = MatMul(x, w) h = Relu(g) other = Relu(g)", 0),
    "a sum over channels": ("[fc] g = MatMul(x, w) h = Softmax(g)", 0),
    "one column": ("[fc] g = MatMul(x, w1) h = Add(g, b)", 0),
    "no product": ("g = Add(rows, b) h = Relu(g)", 0),
    "an activation": ("t = Transpose(x) [fc] g = MatMul(x, t) h = MatMul(g, w5)", 1),
    "a sum of products": ("[fc] g = MatMul(x, w) k = Gemm<transB = 1>(x, m) h = Add(g, k)", 0),
    "no constant": ("a = Add(w, w) [fc] h = MatMul(x, a)", 0),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_product_is_split_in_place_of_its_result(case: str, tmp_path: Path) -> None:
    body, count = SPLITS[case]
    other = ", float[5,20] other" if "other" in body else ""
    random = np.random.default_rng(0)
    shapes = {
        "w": (16, 20),
        "w5": (5, 20),
        "m": (20, 16),
        "b": (20,),
        "r": (1, 20),
        "v": (1,),
        "rows": (5, 20),
        "w1": (16, 1),
        "one": (),
    }
    constants = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    constants["sizes"] = np.array([8, 12])
    outputs = f"float[5,8] p, float[5,12] q{other}"
    body = f"{body} p, q = Split<axis = -1>(h, sizes)"
    model = parsed(body, constants, inputs="float[5,16] x", outputs=outputs)
    path, written = tmp_path / "m.onnx", tmp_path / "w.onnx"
    onnx.save(model, path)
    assert SplitProducts(model, OperandReader(path)).write() == count
    onnx.save(model, written)
    onnx.checker.check_model(model, full_check=True)
    (split,) = [node for node in model.graph.node if node.op_type == "Split"]
    assert (split.input[0] in constants) == bool(count)
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    expected, got = (OnnxSession(file).run({"x": x}) for file in (path, written))
    for name, values in expected.items():
        # Sums of 16 products of up to 10, in another order.
        np.testing.assert_allclose(got[name], values, rtol=0, atol=1e-5)


def test_parts_of_a_product_run_with_their_activation_in_one_kernel(tmp_path: Path) -> None:
    body = "[fc] g = Gemm(x, w, b) h = Relu(g) p, q = Split<axis = -1>(h, sizes)"
    constants = {"w": np.ones((16, 20)), "b": np.ones(20), "sizes": np.array([8, 12])}
    model = parsed(body, constants, inputs="float[batch,16] x", outputs="float[batch,8] p, float[batch,12] q")
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    SplitProducts(model, OperandReader(path)).write()
    onnx.save(model, path)
    dump_optimized(path, tmp_path / "o.onnx", CPU, keeps_float8=False)
    assert [node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node] == ["FusedGemm"] * 2


@pytest.mark.parametrize("readers", [1, 2])
def test_the_weight_of_a_parted_product_is_kept_for_other_readers(readers: int, tmp_path: Path) -> None:
    other = "other = MatMul(x, f)" if readers == 2 else "other = Relu(x)"
    body = f"f = DequantizeLinear(w, s) [fc] h = MatMul(x, f) p, q = Split<axis = -1>(h, sizes) {other}"
    constants = {"w": np.ones((16, 16), np.int8), "s": np.array(0.5), "sizes": np.array([6, 10])}
    outputs = "float[batch,6] p, float[batch,10] q, float[batch,16] other"
    model = parsed(body, constants, inputs="float[batch,16] x", outputs=outputs)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    assert SplitProducts(model, OperandReader(path)).write() == 1
    onnx.checker.check_model(model, full_check=True)
    weights = [node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(weights) == 1 + readers
    assert ("w" in weights) == (readers == 2)
