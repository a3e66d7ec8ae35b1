"""Elementwise operators: arithmetic, transcendental functions, activations, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.quantization import saturated
from loka_onnx.engines.inductor.lowering.registry import OPERATORS
from loka_onnx.engines.inductor.lowering.types import FLOAT8, TORCH_TYPES, type_name
from loka_onnx.engines.inductor.lowering.values import ShapeValue, Value

Tensor = torch.Tensor

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "Log": torch.log,
    "Mish": functional.mish,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Mul": torch.mul,
    "Sub": torch.sub,
}
VARIADIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Sum": torch.add,
}
_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
"""Klambauer et al., "Self-Normalizing Neural Networks", in FP32, as ONNX defines Selu."""


def _register_tables() -> None:
    for op_type, unary in UNARY.items():
        OPERATORS.operator(op_type)(lambda node, x, function=unary: function(x))
    for op_type, binary in BINARY.items():
        OPERATORS.operator(op_type)(lambda node, a, b, function=binary: function(a, b))
    for op_type, combine in VARIADIC.items():
        OPERATORS.operator(op_type)(lambda node, *xs, function=combine: functools.reduce(function, xs))


_register_tables()


@OPERATORS.operator("Mean")
def mean(node: Node, *tensors: Tensor) -> Tensor:
    """The mean of several tensors."""
    return functools.reduce(torch.add, tensors) / len(tensors)


@OPERATORS.operator("Div")
def div(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """A quotient; of integers, rounded toward zero."""
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


@OPERATORS.operator("Mod")
def mod(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """A remainder with the sign of the divisor or, with ``fmod``, of the dividend."""
    return torch.fmod(a, b) if node.get("fmod", 0) else torch.remainder(a, b)


@OPERATORS.operator("Pow", scalars=(1,))
def power(node: Node, base: Tensor, exponent: Value) -> Tensor:
    """A power, in the type of its base."""
    # With a plain number the compiler can turn x² into x·x.
    value: Any = exponent.entries[0] if isinstance(exponent, ShapeValue) else exponent
    is_float = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
    wide = base.to(torch.float64) if is_float and not base.is_floating_point() else base
    return torch.pow(wide, value).to(base.dtype)


@OPERATORS.operator("Sign")
def sign(node: Node, x: Tensor) -> Tensor:
    """−1, 0 or 1; NaN stays NaN, which torch makes 0."""
    return torch.where(x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


@OPERATORS.operator("Clip", scalars=(1, 2))
def clip(node: Node, x: Tensor, low: Value = None, high: Value = None) -> Tensor:
    """Values between two bounds; the upper one wins where they cross."""
    bounds: list[Any] = []
    for bound, name in ((low, "min"), (high, "max")):
        bounds.append(bound.entries[0] if isinstance(bound, ShapeValue) else node.get(name, bound))
    if bounds[0] is not None:
        x = torch.maximum(x, bounds[0]) if isinstance(bounds[0], Tensor) else x.clamp(min=bounds[0])
    if bounds[1] is not None:
        x = torch.minimum(x, bounds[1]) if isinstance(bounds[1], Tensor) else x.clamp(max=bounds[1])
    return x


@OPERATORS.operator("Gelu")
def gelu(node: Node, x: Tensor) -> Tensor:
    """x·Φ(x), exactly or by tanh."""
    return functional.gelu(x, approximate=node.get("approximate", "none"))


@OPERATORS.operator("LeakyRelu")
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    """alpha·x below 0."""
    return functional.leaky_relu(x, node.get("alpha", 0.01))


@OPERATORS.operator("PRelu")
def prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    """slope·x below 0, the slope broadcast to x."""
    return torch.where(x < 0, x * slope, x)


@OPERATORS.operator("ThresholdedRelu")
def thresholded_relu(node: Node, x: Tensor) -> Tensor:
    """Keeps x above alpha, 0 elsewhere."""
    return torch.where(x > node.get("alpha", 1.0), x, torch.zeros_like(x))


@OPERATORS.operator("Elu")
def elu(node: Node, x: Tensor) -> Tensor:
    """alpha·(eˣ − 1) below 0."""
    return functional.elu(x, node.get("alpha", 1.0))


@OPERATORS.operator("Celu")
def celu(node: Node, x: Tensor) -> Tensor:
    """max(0, x) + min(0, alpha·(e^(x/alpha) − 1))."""
    return functional.celu(x, node.get("alpha", 1.0))


@OPERATORS.operator("Selu")
def selu(node: Node, x: Tensor) -> Tensor:
    """gamma·(alpha·(eˣ − 1)) below 0, gamma·x above."""
    alpha, gamma = node.get("alpha", _SELU_ALPHA), node.get("gamma", _SELU_GAMMA)
    return torch.where(x > 0, gamma * x, gamma * alpha * torch.expm1(torch.clamp(x, max=0)))


@OPERATORS.operator("HardSigmoid")
def hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    """alpha·x + beta between 0 and 1."""
    return (node.get("alpha", 0.2) * x + node.get("beta", 0.5)).clamp(0, 1)


@OPERATORS.operator("Shrink")
def shrink(node: Node, x: Tensor) -> Tensor:
    """Moves x toward 0 by bias outside of ±lambd, 0 inside."""
    bias, threshold = node.get("bias", 0.0), node.get("lambd", 0.5)
    inner = torch.where(x > threshold, x - bias, torch.zeros_like(x))
    return torch.where(x < -threshold, x + bias, inner)


@OPERATORS.operator("Swish")
def swish(node: Node, x: Tensor) -> Tensor:
    """x·σ(alpha·x)."""
    return x * torch.sigmoid(node.get("alpha", 1.0) * x)


@OPERATORS.operator("Dropout", numbers=(1, 2))
def dropout(node: Node, x: Tensor, ratio: Value = None, training: Value = None) -> Any:
    """Identity at inference; the mask keeps every element."""
    return (x, torch.ones_like(x, dtype=torch.bool)) if node.wants(1) else x


@OPERATORS.operator("Cast")
def cast(node: Node, x: Tensor) -> Tensor:
    """Another element type; FP8 saturates, as QuantizeLinear does."""
    target = TORCH_TYPES.get(node.attributes["to"])
    if target is None:
        raise node.error(
            f"a cast to {type_name(node.attributes['to'])} is not lowered", "torch has no such type here"
        )
    return _to_type(node, x, target)


@OPERATORS.operator("CastLike", raw=True)
def cast_like(node: Node, x: Value, other: Value) -> Tensor:
    """The element type of another tensor."""
    target = node.tensor(other).dtype if other is None or isinstance(other, Tensor) else other.dtype
    return _to_type(node, node.tensor(x), target)


def _to_type(node: Node, x: Tensor, target: torch.dtype) -> Tensor:
    if target not in FLOAT8:
        return x.to(target)
    if not node.get("saturate", 1):
        raise node.error("FP8 without saturation is not lowered", "saturate is 0")
    return x if x.dtype is target else saturated(x.to(torch.float32), target)


@OPERATORS.operator("BitShift")
def bit_shift(node: Node, x: Tensor, amount: Tensor) -> Tensor:
    """Bits moved left or right."""
    left = node.attributes["direction"] == "LEFT"
    return torch.bitwise_left_shift(x, amount) if left else torch.bitwise_right_shift(x, amount)
