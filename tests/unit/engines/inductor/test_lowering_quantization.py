"""QuantizeLinear and DequantizeLinear, against ml_dtypes and ONNX's reference evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import Array, Case, Fixed, assert_same, lowered, parsed, reference, run  # noqa: E402

from loka_onnx.core.formats import E4M3FN, E5M2, NumberFormat  # noqa: E402
from loka_onnx.errors import EngineError  # noqa: E402
from loka_onnx.numerics.rounding import fake_quantize, quantize, storage_type  # noqa: E402

RANDOM = np.random.default_rng(0)
E4M3 = storage_type(E4M3FN)


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
def test_quantizing_is_that_of_ml_dtypes_bit_for_bit(
    format: NumberFormat, scale: float, tmp_path: Path
) -> None:
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
def test_scales_along_an_axis(axis: int, tmp_path: Path) -> None:
    x = RANDOM.normal(size=(3, 4, 5)).astype(np.float32) * 10
    scale = np.linspace(0.01, 0.2, x.shape[axis]).astype(np.float32)
    zero = np.zeros(scale.shape, E4M3)
    proto = parsed(
        f"q = QuantizeLinear<axis={axis}>(x, s, z) y = DequantizeLinear<axis={axis}>(q, s, z)",
        {"s": scale, "z": zero},
        inputs="float[a,b,c] x",
        output="float[a,b,c] y",
    )
    found = run(lowered(proto, tmp_path), {"x": x})[0]
    np.testing.assert_array_equal(found, fake_quantize(x, scale, E4M3FN, axis % 3))


def test_the_type_may_be_an_attribute(tmp_path: Path) -> None:
    x = corners(E5M2, np.float32(1))[:40]
    attributes = {"output_dtype": onnx.TensorProto.FLOAT8E5M2}
    case = Case("QuantizeLinear", [x, Fixed(np.float32(0.5))], attributes)
    np.testing.assert_array_equal(run(lowered(case.model(), tmp_path), case.feeds)[0], quantize(x, 0.5, E5M2))


INTEGERS = [
    Case("QuantizeLinear", [RANDOM.normal(size=(4, 6)).astype(np.float32), Fixed(np.float32(0.02))]),
    Case(
        "QuantizeLinear",
        [np.linspace(-9, 9, 12, dtype=np.float32), Fixed(np.float32(0.05)), Fixed(np.array(-3, np.int8))],
    ),
    Case(
        "DequantizeLinear",
        [
            RANDOM.integers(-100, 100, (4, 6)).astype(np.int8),
            Fixed(np.linspace(0.1, 0.4, 4).astype(np.float32)),
            Fixed(np.array([1, 2, 3, 4], np.int8)),
        ],
        {"axis": 0},
    ),
]


@pytest.mark.parametrize("case", INTEGERS, ids=range(len(INTEGERS)))
def test_integers_agree_with_the_reference(case: Case, tmp_path: Path) -> None:
    found = run(lowered(case.model(), tmp_path), case.feeds)[0]
    assert_same(found, reference(case.model(), case.feeds)[0], 1e-6)


# Declined ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "attributes", "said"),
    [
        (np.zeros((), ml_dtypes.float8_e4m3fnuz), {}, "values of type FLOAT8E4M3FNUZ are not lowered"),
        (np.zeros((), E4M3), {"saturate": 0}, "FP8 without saturation is not lowered"),
        (np.ones((), E4M3), {}, "the zero point of an FP8 tensor must be 0"),
    ],
)
def test_what_is_declined(zero: Any, attributes: dict[str, int], said: str, tmp_path: Path) -> None:
    case = Case("QuantizeLinear", [np.ones(3, np.float32), Fixed(np.float32(1)), Fixed(zero)], attributes)
    with pytest.raises(EngineError, match=said) as caught:
        run(lowered(case.model(), tmp_path), case.feeds)
    assert "let another backend build this model" in str(caught.value)
