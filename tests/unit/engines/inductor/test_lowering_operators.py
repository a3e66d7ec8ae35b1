"""Each operator against ONNX's reference evaluator, which shares no code with torch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import Array, Case, Fixed, assert_same, exported, lowered, reference, run  # noqa: E402
from onnx_text import parsed  # noqa: E402

from loka_onnx.engines.inductor.lowering.node import OPERATORS  # noqa: E402
from loka_onnx.errors import EngineError  # noqa: E402

RANDOM = np.random.default_rng(0)


def f(*shape: int, low: float = -3.0, high: float = 3.0) -> Array:
    return RANDOM.uniform(low, high, size=shape).astype(np.float32)


def n(*values: int) -> Fixed:
    return Fixed(np.array(values, np.int64))


def i(values: Any) -> Array:
    return np.array(values, np.int64)


def s(value: Any, dtype: Any = np.int64) -> Fixed:
    return Fixed(np.array(value, dtype))


SPECIAL = np.array([[-np.inf, -3.5, -2.5, -0.5, -0.0], [0.0, 0.5, 1.5, np.inf, np.nan]], np.float32)
UNIT = f(3, 4, low=-0.95, high=0.95)
POSITIVE = f(3, 4, low=0.1, high=4.0)
FLAGS = np.array([[True, False], [True, True]]), np.array([[True, True], [False, True]])

UNARY = [
    *(Case(op, [f(3, 4)]) for op in ("Abs", "Atan", "Cos", "Erf", "Exp", "Neg", "Relu", "Sigmoid", "Sin")),
    *(Case(op, [f(3, 4)]) for op in ("Sinh", "Cosh", "Tan", "Tanh", "Asinh", "Softplus", "Softsign")),
    *(Case(op, [f(3, 4)]) for op in ("Ceil", "Floor", "HardSwish", "Mish", "HardSigmoid", "Identity")),
    *(Case(op, [UNIT]) for op in ("Acos", "Asin", "Atanh")),
    *(Case(op, [POSITIVE]) for op in ("Log", "Sqrt", "Reciprocal")),
    Case("Acosh", [f(3, 4, low=1.1, high=5.0)]),
    *(Case(op, [SPECIAL]) for op in ("Round", "Sign", "Relu", "Abs", "IsNaN", "IsInf", "Identity", "Tanh")),
    Case("IsInf", [SPECIAL], {"detect_negative": 0}),
    Case("IsInf", [SPECIAL], {"detect_positive": 0}),
    Case("Sign", [i([-3, 0, 2])]),
    Case("BitwiseNot", [i([-3, 0, 2])]),
    Case("Gelu", [f(3, 4)]),
    Case("Gelu", [f(3, 4)], {"approximate": "tanh"}),
    Case("LeakyRelu", [f(3, 4)], {"alpha": 0.3}),
    Case("PRelu", [f(3, 4), f(4)]),
    Case("Elu", [f(3, 4)], {"alpha": 0.7}),
    Case("ThresholdedRelu", [f(3, 4)], {"alpha": 0.7}),
    Case("Celu", [f(3, 4)], {"alpha": 0.7}),
    Case("Selu", [f(3, 4)]),
    Case("CastLike", [i([0, 1, 2]), f(1)]),
    Case("CastLike", [f(3), s(1)]),
    Case("HardSigmoid", [f(3, 4)], {"alpha": 0.3, "beta": 0.4}),
    Case("Swish", [f(3, 4)], {"alpha": 1.5}, opset=24),
    Case("Not", [FLAGS[0]]),
    Case("Dropout", [f(3, 4)]),
    Case("Dropout", [f(3, 4)], outputs=2),
]
BINARY = [
    *(Case(op, [f(3, 4), f(4)]) for op in ("Add", "Sub", "Mul", "Div", "Less", "Greater", "Min", "Max")),
    *(Case(op, [f(2, 1, 4), f(3, 1)]) for op in ("Add", "LessOrEqual", "GreaterOrEqual")),
    *(Case(op, [SPECIAL, SPECIAL[::-1].copy()]) for op in ("Equal", "Min", "Max", "Add", "Less")),
    *(Case(op, list(FLAGS)) for op in ("And", "Or", "Xor", "Equal")),
    *(Case(op, [f(3, 4), f(4), f(3, 1)]) for op in ("Sum", "Mean", "Min", "Max")),
    *(Case(op, [i([6, -3, 5]), i([3, 2, 6])]) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    Case("Div", [i([7, 9, 12]), i([2, 3, 5])]),
    Case("Mod", [i([7, -7, 7]), i([3, 3, -3])]),
    Case("Mod", [i([7, -7, 7]), i([3, 3, -3])], {"fmod": 1}),
    Case("Mod", [f(3, 4), f(4, low=1.0)], {"fmod": 1}),
    Case("Pow", [POSITIVE, f(4)]),
    Case("Pow", [f(3, 4), s(2.0, np.float32)]),
    Case("Pow", [f(3, 4), s(3)]),
    Case("Pow", [i([1, 2, 3]), s(2.0, np.float32)]),
    Case("Clip", [f(3, 4), s(-1.0, np.float32), s(0.5, np.float32)]),
    Case("Clip", [SPECIAL, s(-1.0, np.float32), None]),
    Case("Clip", [f(3, 4), None, s(0.5, np.float32)]),
    Case("Clip", [f(3, 4), np.array(-1, np.float32), np.array(1, np.float32)]),
    Case("Clip", [i([1, 5, 9]), s(2), s(7)]),
    Case("Where", [FLAGS[0], f(2, 2), f(2)]),
    *(Case("Cast", [f(3, 4)], {"to": kind}) for kind in (1, 7, 10, 11, 16)),
    Case("Cast", [i([0, 1, 2])], {"to": onnx.TensorProto.BOOL}),
    Case("Cast", [FLAGS[0]], {"to": onnx.TensorProto.FLOAT}),
]
PRODUCTS = [
    Case("MatMul", [f(3, 4), f(4, 5)]),
    Case("MatMul", [f(2, 3, 4), Fixed(f(4, 5))]),
    Case("MatMul", [Fixed(f(3, 4)), f(2, 4, 5)]),
    Case("MatMul", [f(2, 1, 3, 4), f(6, 4, 5)]),
    Case("MatMul", [f(2, 4, 1, 16), Fixed(f(4, 16, 16))]),
    Case("MatMul", [f(2, 4, 1, 16), f(2, 4, 16, 1)]),
    Case("MatMul", [f(2, 3, 4), Fixed(f(4, 1))]),
    Case("MatMul", [Fixed(f(3, 4)), f(2, 4, 1)]),
    Case("MatMul", [f(4), f(4, 5)]),
    Case("MatMul", [f(3, 4), f(4)]),
    Case("Gemm", [f(3, 4), f(4, 5)]),
    Case("Gemm", [f(3, 4), Fixed(f(5, 4)), Fixed(f(5))], {"transB": 1}),
    Case("Gemm", [f(4, 3), f(4, 5), f(1, 5)], {"transA": 1}),
    Case("Gemm", [f(4, 3), f(5, 4), f(3, 1)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 0.25}),
    Case("Gemm", [f(3, 4), f(4, 5), s(2.0, np.float32)], {"alpha": 2.0}),
    Case("Gemm", [f(3, 4), f(4, 5), f(3, 5)], {"beta": 0.0}),
    Case("Gemm", [f(1, 4), f(4, 1), f(1, 1)]),
    Case("Gemm", [f(3, 4), Fixed(f(1, 4)), Fixed(f(1))], {"transB": 1}),
    Case("Gemm", [f(3, 4), Fixed(f(4, 1)), Fixed(f(1))], {"alpha": 0.5}),
    Case("Einsum", [f(2, 3, 4), f(2, 5, 4)], {"equation": "bnd,bmd->bnm"}),
    Case("Einsum", [f(2, 3, 4), f(4, 5)], {"equation": "...d, de -> ...e"}),
    Case("Einsum", [f(3, 3)], {"equation": "ii->i"}),
    Case("Conv", [f(2, 4, 9), Fixed(f(6, 4, 3)), Fixed(f(6))], {"pads": [1, 1]}),
    Case("Conv", [f(2, 4, 9), f(6, 2, 3)], {"group": 2, "strides": [2], "dilations": [2]}),
    Case("Conv", [f(2, 3, 7, 8), f(5, 3, 3, 2), f(5)], {"pads": [1, 0, 1, 0], "strides": [2, 1]}),
    Case("Conv", [f(2, 3, 7, 8), f(5, 3, 3, 2)], {"pads": [0, 1, 2, 0]}),
    Case("Conv", [f(2, 3, 7, 8), f(5, 3, 4, 4)], {"auto_pad": "VALID"}),
    Case("GlobalAveragePool", [f(2, 3, 4, 5)]),
    Case("GlobalMaxPool", [f(2, 3, 4, 5)]),
]
MOVEMENT = [
    Case("Reshape", [f(2, 3, 4), n(0, -1)]),
    Case("Reshape", [f(2, 3, 4), n(4, 6)]),
    Case("Reshape", [f(0, 3), n(3, 0)], {"allowzero": 1}),
    *(Case("Flatten", [f(2, 3, 4)], {"axis": axis}) for axis in (0, 1, 2, 3, -1)),
    Case("Flatten", [f(2, 3)]),
    Case("Transpose", [f(2, 3, 4)]),
    Case("Transpose", [f(2, 3, 4)], {"perm": [0, 2, 1]}),
    Case("Squeeze", [f(1, 3, 1)]),
    Case("Squeeze", [f(1, 3, 1), n(-1)]),
    Case("Unsqueeze", [f(2, 3), n(0, -1)]),
    Case("Concat", [f(2, 3), f(2, 4), Fixed(f(2, 1))], {"axis": -1}),
    Case("Split", [f(2, 7), n(3, 4)], {"axis": 1}, outputs=2),
    Case("Split", [f(7, 2)], {"num_outputs": 3}, outputs=3),
    Case("Split", [f(6, 2)], outputs=3, opset=13),
    Case("Slice", [f(5, 6), n(1), n(4)]),
    Case("Slice", [f(5, 6), n(-3, 0), n(2**63 - 1, -1), n(1, 0)]),
    Case("Slice", [f(5, 6), n(0), n(2**63 - 1), n(1), n(2)]),
    Case("Slice", [f(5, 6), n(-1), n(-(2**63)), n(1), n(-2)]),
    Case("Slice", [f(5, 6), n(9), n(1), n(0), n(-1)]),
    Case("Expand", [f(3, 1), n(2, 1, 4)]),
    Case("Expand", [f(2, 3), n(1)]),
    Case("Tile", [f(2, 3), n(2, 3)]),
    Case("Pad", [f(3, 4), n(1, 0, 0, 2), s(1.5, np.float32)]),
    Case("Pad", [f(3, 4), n(2, 1), None, n(1)]),
    Case("Trilu", [f(4, 5)]),
    Case("Trilu", [f(2, 4, 4), s(-1)], {"upper": 0}),
    Case("Shape", [f(2, 3, 4)]),
    Case("Shape", [f(2, 3, 4)], {"start": 1, "end": -1}),
    Case("Size", [f(2, 3, 4)]),
    Case("ConstantOfShape", [n(2, 3)]),
    Case("ConstantOfShape", [n(3)], {"value": onnx.numpy_helper.from_array(np.array([7]))}),
    Case("Range", [s(1), s(9), s(3)]),
    Case("Range", [s(1.0, np.float32), s(0.0, np.float32), s(-0.25, np.float32)]),
    Case("Constant", [], {"value_floats": [1.0, 2.5]}),
    Case("Constant", [], {"value_int": 3}),
    Case("Constant", [], {"value": onnx.numpy_helper.from_array(f(2, 3))}),
]
INDEXING = [
    Case("Gather", [f(5, 4), i([[0, 2], [-1, 1]])]),
    Case("Gather", [f(5, 4), i([3, -4])], {"axis": 1}),
    Case("Gather", [f(5, 4), s(-2)], {"axis": 1}),
    Case("Gather", [f(5, 4), n(3, 1)], {"axis": -1}),
    Case("Gather", [f(5, 4), np.array([1, 2], np.int32)]),
    Case("GatherElements", [f(3, 3), i([[1, -2, 0], [2, 0, 0]])]),
    Case("GatherElements", [f(3, 3), i([[1], [-3], [0]])], {"axis": 1}),
    Case("GatherND", [f(3, 4, 5), i([[0, 1], [-1, 3]])]),
    Case("GatherND", [f(3, 4, 5), i([[1], [-2], [0]])], {"batch_dims": 1}),
    Case("GatherND", [f(2, 3, 4, 5), i([[[1], [0], [3]], [[0], [2], [1]]])], {"batch_dims": 2}),
    Case("ScatterElements", [f(3, 3), i([[1, -1, 2]]), f(1, 3)]),
    Case("ScatterElements", [f(3, 3), i([[1, 1, 2]]), f(1, 3)], {"axis": 1, "reduction": "add"}),
    Case("ScatterElements", [f(3, 3), i([[1, 0, 2]]), f(1, 3)], {"reduction": "max"}),
    Case("ScatterND", [f(4, 3), i([[1], [-1]]), f(2, 3)]),
    Case("ScatterND", [f(4, 3), i([[1, 2], [0, 0]]), f(2)]),
    Case("ScatterND", [f(4, 3), i([[1], [1]]), f(2, 3)], {"reduction": "add"}),
    Case("ScatterND", [f(4, 3), i([[1], [2]]), f(2, 3)], {"reduction": "mul"}),
    Case("ScatterND", [f(4, 3), i([[1], [2]]), f(2, 3)], {"reduction": "min"}),
    Case("OneHot", [i([0, -1, 2]), s(4), Fixed(np.array([0, 1], np.float32))]),
    Case("OneHot", [i([[0, 1], [2, 1]]), s(3), Fixed(np.array([-1, 5]))], {"axis": 1}),
    Case("TopK", [f(3, 6), n(2)], outputs=2),
    Case("TopK", [f(6, 3), n(2)], {"axis": 0, "largest": 0}, outputs=2),
    Case("CumSum", [f(3, 4), s(1)]),
    Case("CumSum", [f(3, 4), s(0)], {"reverse": 1}),
    Case("CumSum", [f(3, 4), s(-1)], {"exclusive": 1}),
    Case("CumSum", [i([1, 2, 3]), s(0)], {"exclusive": 1, "reverse": 1}),
]
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
REDUCTIONS = [
    *(Case(f"Reduce{op}", [f(2, 3, 4), n(-1)]) for op in _REDUCTIONS),
    *(Case(f"Reduce{op}", [f(2, 3, 4), n(0, 2)], {"keepdims": 0}) for op in _REDUCTIONS),
    *(Case(f"Reduce{op}", [f(2, 3, 4)]) for op in _REDUCTIONS),
    *(Case(f"Reduce{op}", [f(2, 3)], {"noop_with_empty_axes": 1}) for op in ("Sum", "Mean", "Max", "L2")),
    *(Case(f"Reduce{op}", [SPECIAL[:, :4], n(1)]) for op in ("Max", "Min", "Sum", "Mean")),
    *(Case(f"Reduce{op}", [SPECIAL, n(1)]) for op in ("Max", "Min")),
    Case("ReduceLogSum", [POSITIVE, n(1)]),
    Case("ReduceSum", [i([[1, 2], [3, 4]]), n(0)]),
    Case("ReduceMax", [FLAGS[0], n(0)]),
    Case("ReduceMin", [FLAGS[0], n(0)]),
    Case("ArgMax", [f(3, 4)]),
    Case("ArgMin", [f(3, 4)], {"axis": -1, "keepdims": 0}),
    Case("ArgMax", [i([[1, 3, 3], [2, 2, 0]])], {"axis": 1}),
    Case("ArgMax", [i([[1, 3, 3], [2, 2, 0]])], {"axis": 1, "select_last_index": 1}),
    Case("MaxPool", [f(2, 3, 7)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    Case("MaxPool", [f(2, 3, 5, 4)], {"kernel_shape": [2, 3], "dilations": [2, 1]}),
    Case("AveragePool", [f(2, 3, 7)], {"kernel_shape": [3], "pads": [1, 1]}),
    Case(
        "AveragePool", [f(2, 3, 5, 4)], {"kernel_shape": [2, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}
    ),
    Case("Softmax", [f(3, 4)]),
    Case("Softmax", [f(2, 3, 4)], {"axis": 1}),
    Case("LogSoftmax", [f(3, 4)]),
]
NORMS = [
    Case("LayerNormalization", [f(3, 8), Fixed(f(8)), Fixed(f(8))]),
    Case("LayerNormalization", [f(3, 8), Fixed(f(8))], {"epsilon": 1e-3}),
    Case("LayerNormalization", [f(2, 3, 8), f(3, 8), f(3, 8)], {"axis": 1}),
    Case("RMSNormalization", [f(3, 8), f(8)]),
    Case("RMSNormalization", [f(2, 3, 8), f(3, 8)], {"axis": 1, "epsilon": 0.1}),
    Case("GroupNormalization", [f(2, 6, 5), f(6), f(6)], {"num_groups": 3}, opset=21),
    Case("InstanceNormalization", [f(2, 3, 5), f(3), f(3)], {"epsilon": 0.01}),
    Case("BatchNormalization", [f(4, 3), f(3), f(3), f(3), f(3, low=0.5)], {"epsilon": 0.01}),
    Case("BatchNormalization", [f(4, 3, 5), f(3), f(3), f(3), f(3, low=0.5)]),
]
# FP8 is tested beside its products.
BYTES = RANDOM.integers(-100, 100, (4, 6)).astype(np.int8)
QUANTIZERS = [
    Case("QuantizeLinear", [f(4, 6), s(0.02, np.float32)]),
    Case("QuantizeLinear", [np.linspace(-9, 9, 12, dtype=np.float32), s(0.05, np.float32), s(-3, np.int8)]),
    Case("DequantizeLinear", [BYTES, Fixed(f(4, low=0.1, high=0.4)), s([1, 2, 3, 4], np.int8)], {"axis": 0}),
]
CASES = [*UNARY, *BINARY, *PRODUCTS, *MOVEMENT, *INDEXING, *REDUCTIONS, *NORMS, *QUANTIZERS]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.op}-{number}" for number, case in enumerate(CASES)])
def test_an_operator_agrees_with_the_reference(case: Case, tmp_path: Path) -> None:
    proto = case.model()
    expected = reference(proto, case.feeds)
    found = run(lowered(proto, tmp_path), case.feeds)
    assert len(found) == case.outputs
    for one, other in zip(found, expected, strict=True):
        # Both sum in FP32, in another order: about fifty roundings of the largest value.
        assert_same(one, other, 1e-6 if "Linear" in case.op else 1e-5)


@pytest.mark.parametrize(
    ("left", "right", "is_sum"),
    [
        ("float[batch,4,1,16]", (4, 16, 16), True),
        ("float[batch,8,64]", (64, 1), True),
        ("float[batch,64]", (64, 1), True),
        # Each row would read the whole of a large matrix.
        ("float[batch,1,96]", (96, 96), False),
        # One row of a request is no row of every request.
        ("float[batch,16]", (16, 16), False),
    ],
)
def test_products_with_vectors_are_sums_that_fuse(left, right, is_sum, tmp_path):
    weight = RANDOM.normal(size=right).astype("bfloat16")
    proto = parsed(
        "b = Cast<to=16>(x) p = MatMul(b, w) y = Cast<to=1>(p)",
        {"w": weight},
        inputs=f"{left} x",
        outputs="float y",
    )
    row = [int(length) for length in left[:-1].split(",")[1:]]
    x = RANDOM.normal(size=(5, *row)).astype(np.float32)
    program = exported(lowered(proto, tmp_path), {"x": x})
    called = {str(node.target) for node in program.graph.nodes}
    assert any("matmul" in name or "mm" in name for name in called) is not is_sum
    for rows in (x, x[:1]):
        exact = np.matmul(rows.astype("bfloat16").astype(np.float64), weight.astype(np.float64))
        # Summed in FP32 and rounded to BF16 once.
        np.testing.assert_allclose(run(program, {"x": rows})[0], exact, rtol=2**-8, atol=1e-4)


def test_every_registered_operator_is_in_the_table() -> None:
    recurrent = {"RNN", "GRU", "LSTM"}  # test_lowering_recurrent.py
    assert {op for domain, op in OPERATORS if not domain} == {case.op for case in CASES} | recurrent


def test_negative_pads_crop_and_integers_divide_toward_zero(tmp_path: Path) -> None:
    x = f(3, 4)
    case = Case("Pad", [x, n(2, -1), None, n(1)])
    found = run(lowered(case.model(), tmp_path), case.feeds)[0]
    np.testing.assert_array_equal(found, np.pad(x, ((0, 0), (2, 0)))[:, :-1])
    case = Case("Div", [i([7, -7, 7, -7]), i([2, 2, -2, -2])])
    assert run(lowered(case.model(), tmp_path), case.feeds)[0].tolist() == [3, -3, -3, 3]


def test_bfloat16_stays_bfloat16_and_norms_sum_in_float32(tmp_path: Path) -> None:
    """Sums of 4,096 ones would stop at 256 in BF16, and the mean be wrong by far more than its rounding."""
    ones = np.ones(4096, "bfloat16")
    proto = parsed(
        "b = Cast<to=16>(x) c = Add(b, one) n = LayerNormalization(c, gain, shift) y = Mul(n, one)",
        {"gain": ones, "shift": np.zeros_like(ones), "one": ones[0]},
        inputs="float[batch,4096] x",
        outputs="bfloat16[batch,4096] y",
    )
    x = RANDOM.normal(size=(2, 4096)).astype(np.float32) + 100
    found = run(lowered(proto, tmp_path), {"x": x})[0]
    assert found.dtype == np.dtype("bfloat16")
    stored = (x.astype("bfloat16") + np.array(1, "bfloat16")).astype(np.float64)
    expected = (stored - stored.mean(1, keepdims=True)) / stored.std(1, keepdims=True)
    # One rounding to BF16 is 2⁻⁹ of a value; two of them, of values up to 5.
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize(("op", "form"), [
    ("AveragePool", {"ceil_mode": 1}), ("AveragePool", {"pads": [1, 0]}),
    ("MaxPool", {"auto_pad": "SAME_UPPER"}), ("MaxPool", {"ceil_mode": 1, "pads": [0, 1]}),
])  # fmt: skip
def test_pools_whose_edge_torch_counts_otherwise_are_refused(op, form, tmp_path):
    case = Case(op, [f(2, 3, 6)], {"kernel_shape": [2], "strides": [2], **form})
    with pytest.raises(EngineError, match=f"a {op} of this form is not lowered"):
        run(lowered(case.model(), tmp_path), case.feeds)


@pytest.mark.parametrize("body", ["y = Div(x, c)", "y = Div(c, x)"])
def test_quotients_of_integers_and_a_constant_take_no_constant_of_rank_0(body, tmp_path):
    """Inductor computes them in FP32: x − x / 50 · 50, a bucket of ids, was wrong beyond 2²⁴."""
    proto = parsed(body, {"c": np.array(50)}, inputs="int64[batch,3] x", outputs="int64[batch,3] y")
    x = np.array([[7, -120, 2**40 + 51], [1, -2, 3]])
    program = exported(lowered(proto, tmp_path), {"x": x})
    (quotient,) = (node for node in program.graph.nodes if "aten.div" in str(node.target))
    assert all(isinstance(each, int) or each.meta["val"].dim() == 2 for each in quotient.args)
    np.testing.assert_array_equal(run(program, {"x": x})[0], reference(proto, {"x": x})[0])


@pytest.mark.parametrize("shape", [(), (3,), (1, 1)])
def test_expand_of_a_constant_is_one_expand(shape, tmp_path):
    """Inductor of PyTorch 2.11 has no reshape of a constant of rank 0, as `zeros_like` is exported."""
    proto = parsed(
        "s = Shape(x) e = Expand(value, s) y = Max(x, e)",
        {"value": RANDOM.normal(size=shape).astype(np.float32)},
        inputs="float[batch,3] x",
        outputs="float[batch,3] y",
    )
    x = RANDOM.normal(size=(4, 3)).astype(np.float32)
    program = exported(lowered(proto, tmp_path), {"x": x})
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "aten.expand.default" in called
    assert "aten.reshape.default" not in called
    for rows in (x, x[:2]):
        np.testing.assert_array_equal(run(program, {"x": rows})[0], reference(proto, {"x": rows})[0])
