"""ONNX Runtime's CPU provider is given convolutions for products with a weight on the left, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.pointwise import write_convolutions
from loka_onnx.sessions.onnx_session import OnnxSession

W, B = (24, 16), (24, 1)
X = "float[batch,16,6] x"
CASES = {
    "alone": ("[fc] y = MatMul(w, x)", X, ["Conv"]),
    "with a bias": ("[fc] h = MatMul(w, x) y = Add(h, b)", X, ["Conv"]),
    "with a bias in front": ("[fc] h = MatMul(w, x) g = Add(b, h) y = Relu(g)", X, ["Conv", "Relu"]),
    "with a row for a bias": ("[fc] h = MatMul(w, x) y = Add(h, r)", X, ["Conv", "Add"]),
    "a bias that is read twice": (
        "[fc] h = MatMul(w, x) g = Add(h, b) y = Mul(g, b)",
        X,
        ["Conv", "Add", "Mul"],
    ),
    "a product that is read twice": (
        "[fc] h = MatMul(w, x) g = Add(h, b) y = Mul(g, h)",
        X,
        ["Conv", "Add", "Mul"],
    ),
    # Left as they are.
    "a weight that is read twice": (
        "[fc] h = MatMul(w, x) [fd] g = MatMul(w, x) y = Add(h, g)",
        X,
        ["MatMul", "MatMul", "Add"],
    ),
    "heads": ("[fc] y = MatMul(w, x)", "float[batch,2,16,6] x", ["MatMul"]),
    "no batch": ("[fc] y = MatMul(w, x)", "float[16,batch] x", ["MatMul"]),
    "fp8": (
        "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) [fc] y = MatMul(w, d)",
        X,
        ["QuantizeLinear", "DequantizeLinear", "MatMul"],
    ),
}


def write(folder: Path, body: str, entry: str, *, external: bool = False) -> Path:
    shape = entry.removeprefix("float[").removesuffix("] x").split(",")
    result = ",".join([*shape[:-2], "24", shape[-1]])
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({entry}) => (float[{result}] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    constants = {
        "w": random.normal(size=W).astype(np.float32),
        "b": random.normal(size=B).astype(np.float32),
        "r": random.normal(size=(24, 6)).astype(np.float32),
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.uint8),
    }
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items() if n in read)
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "m.onnx", save_as_external_data=external, location="w.bin", size_threshold=64)
    return folder / "m.onnx"


@pytest.mark.parametrize("case", CASES)
def test_products_with_a_weight_on_the_left(case: str, tmp_path: Path) -> None:
    body, entry, operators = CASES[case]
    before = write(tmp_path / "before", body, entry)
    after = Path(shutil.copy(before, tmp_path / "after.onnx"))
    assert write_convolutions(after) == operators.count("Conv")
    model = onnx.load(after)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == operators
    shape = {"heads": (5, 2, 16, 6), "no batch": (16, 6)}.get(case, (5, 16, 6))
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    expected, found = (OnnxSession(path).run({"x": x})["y"] for path in (before, after))
    # Sums of 16 products of up to 10, rounded 16 times to 2⁻²⁴ of it, in another order.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    if not case.startswith(("a weight", "heads", "no batch", "fp8")):
        node = OperandReader(after).product("fc")
        assert node is not None
        assert [source.describe() for source in OperandReader(after).operands(node)] == ["float", "float"]


def test_weights_beside_the_model_stay_where_they_are(tmp_path: Path) -> None:
    engine = write(tmp_path / "e", "[fc] h = MatMul(w, x) y = Add(h, b)", X, external=True)
    data = (engine.parent / "w.bin").read_bytes()
    x = {"x": np.random.default_rng(1).normal(size=(5, 16, 6)).astype(np.float32)}
    expected = OnnxSession(engine).run(x)["y"]
    assert write_convolutions(engine) == 1
    assert (engine.parent / "w.bin").read_bytes() == data
    assert sorted(path.name for path in engine.parent.iterdir()) == ["m.onnx", "w.bin"]
    np.testing.assert_allclose(OnnxSession(engine).run(x)["y"], expected, rtol=0, atol=1e-5)
