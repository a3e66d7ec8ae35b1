"""INT8 products that stay in FP32 because they are slower: times on this processor, and equal values."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.cpu_form import IntegerProducts
from loka_onnx.engines.onnxruntime.faster_products import FasterProducts, write_fp32
from loka_onnx.sessions.host_devices import integer_instructions
from loka_onnx.sessions.onnx_session import OnnxSession

pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")
# Sums of other processors saturate.
needs_integers = pytest.mark.skipif(not integer_instructions(), reason="needs VNNI, AMX or ARM's dot product")

BODY = """
    qx = QuantizeLinear(x, s, z) dx = DequantizeLinear(qx, s, z)
    w1 = DequantizeLinear<axis = 1>(q1, s1, z1)
    [wide] h = Gemm(dx, w1, b1) r = Relu(h)
    qr = QuantizeLinear(r, s, zero) dr = DequantizeLinear(qr, s, zero)
    w2 = DequantizeLinear<axis = 0>(q2, s2, z2)
    [next] y = Gemm<transB = 1>(dr, w2)
    qt = QuantizeLinear(t, s, z) dt = DequantizeLinear(qt, s, z)
    w3 = DequantizeLinear<axis = 1>(q3, s3, z3)
    [thin] u = MatMul(dt, w3)
"""
Model = tuple[onnx.ModelProto, Path]
SCALE = np.float32(0.05)
SHAPES = {"1": (512, 512), "2": (512, 512), "3": (1, 16)}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> '
        f"g (float[b,512] x, float[b,1] t) => (float[b,512] y, float[b,16] u) {{ {BODY} }}"
    )
    random = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "s": np.array(SCALE),
        "z": np.array(128, np.uint8),
        "zero": np.array(0, np.uint8),
    }
    constants["b1"] = random.normal(size=512).astype(np.float32)
    for name, shape in SHAPES.items():
        channels = shape[0] if name == "2" else shape[1]
        constants[f"q{name}"] = random.integers(-127, 128, shape).astype(np.int8)
        constants[f"s{name}"] = random.uniform(1e-3, 2e-3, channels).astype(np.float32)
        constants[f"z{name}"] = np.zeros(channels, np.int8)
    proto.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in constants.items())
    onnx.save(proto, tmp_path / "m.onnx")
    return proto, tmp_path / "m.onnx"


def inputs(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {n: random.normal(size=(count, k)).astype(np.float32) for n, k in (("x", 512), ("t", 1))}


@pytest.mark.slow
@needs_integers
def test_a_product_with_one_row_of_weights_is_slower_in_int8_and_a_wide_chain_is_not(model: Model) -> None:
    proto, path = model
    before = proto.SerializeToString()
    slower = FasterProducts(proto, path).slower(inputs(16), (64, 256))
    assert slower.keys() == {"thin"}
    assert "µs at batch 64" in slower["thin"]
    assert proto.SerializeToString() == before
    assert {file.name for file in path.parent.iterdir()} == {"m.onnx"}


def test_units_of_one_structure_are_raced_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    proto, path = model
    twins = onnx.parser.parse_graph(
        "g (float[b,1] t) => (float[b,16] v, float[b,16] k) { "
        "qo = QuantizeLinear(t, s, zero) do = DequantizeLinear(qo, s, zero) "
        "w4 = DequantizeLinear<axis = 1>(q4, s3, z3) [twin] v = MatMul(do, w4) "
        "qk = QuantizeLinear(t, s, zero) dk = DequantizeLinear(qk, s, zero) "
        "w5 = DequantizeLinear<axis = 1>(q4, s4, z4) [other] k = MatMul(dk, w5) }"
    )
    proto.graph.node.extend(twins.node)
    proto.graph.output.extend(twins.output)
    values = {"q4": np.ones(SHAPES["3"], np.int8), "s4": np.array(SCALE), "z4": np.array(0, np.int8)}
    proto.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in values.items())
    onnx.save(proto, path)
    raced, open_model = [], OnnxSession.in_memory

    def counted(model: onnx.ModelProto, *rest: Any) -> OnnxSession:
        raced.append(next(node.name for node in reversed(model.graph.node) if node.name))
        return open_model(model, *rest)

    monkeypatch.setattr(OnnxSession, "in_memory", counted)
    slower = FasterProducts(proto, path).slower(inputs(16), (16,))
    assert slower.get("twin") == slower.get("thin")
    # In INT8 and in FP32. One scale for all channels is another structure.
    assert raced.count("thin") + raced.count("twin") == raced.count("other") == 2


@needs_integers
@pytest.mark.parametrize("products", [("thin",), ("next",), ("wide",), ("wide", "next", "thin")])
def test_what_is_written_in_fp32_has_no_rounded_activation(model: Model, products: tuple[str, ...]) -> None:
    proto, path = model
    reader = OperandReader(path)
    write_fp32(proto, products, reader)
    IntegerProducts(proto, reader).write()
    onnx.checker.check_model(proto, full_check=True)
    given = inputs(64)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}

    def rounded(values: np.ndarray, product: str, zero: int) -> np.ndarray:
        if product in products:
            return values
        q = np.clip(np.rint(np.float32(values) / SCALE) + zero, 0, 255) - zero
        return np.asarray(q * np.float64(SCALE))

    weights = {name: reader.values(f"q{name}") * np.float64(reader.values(f"s{name}")) for name in "13"}
    of_next = reader.values("q2").T * np.float64(reader.values("s2"))
    hidden = np.maximum(rounded(given["x"], "wide", 128) @ weights["1"] + constants["b1"], 0)
    want = {"y": rounded(hidden, "next", 0) @ of_next, "u": rounded(given["t"], "thin", 128) @ weights["3"]}
    got = OnnxSession.in_memory(proto, {}, path).run(given)
    for name, values in want.items():
        # One step of an activation, where a tie falls the other way, moves a sum by 0.05 · 0.25.
        np.testing.assert_allclose(got[name], values, atol=0.03)
        assert np.median(np.abs(got[name] - values)) < 1e-4
