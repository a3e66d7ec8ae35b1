"""Elementwise operators: arithmetic, transcendental functions, comparisons, activations, casts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from onnx import TensorProto
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import OPERATORS, Lowering, Node, Operator, operator
from loka_onnx.engines.inductor.lowering.values import FLOAT8, TORCH_TYPES, ShapeValue, Value, saturated

Tensor = torch.Tensor

_SAME_NAME = (
    "Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Mul Neg Reciprocal "
    "Relu Round Sigmoid Sin Sinh Sqrt Sub Tan Tanh Where"
)
"""Operators that torch calls by the same name, in lower case."""
_LOGICAL, _ACTIVATIONS = ("And", "Not", "Or", "Xor"), ("HardSwish", "Mish", "Softplus", "Softsign")
PLAIN: dict[str, Lowering] = {
    **{op_type: getattr(torch, op_type.lower()) for op_type in _SAME_NAME.split()},
    **{op_type: getattr(torch, f"logical_{op_type.lower()}") for op_type in _LOGICAL},
    **{f"Bitwise{op_type}": getattr(torch, f"bitwise_{op_type.lower()}") for op_type in _LOGICAL},
    **{op_type: getattr(functional, op_type.lower()) for op_type in _ACTIVATIONS},
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    # Of any number of tensors.
    "Max": lambda *xs: functools.reduce(torch.maximum, xs),
    "Mean": lambda *xs: functools.reduce(torch.add, xs) / len(xs),
    "Min": lambda *xs: functools.reduce(torch.minimum, xs),
    "Sum": lambda *xs: functools.reduce(torch.add, xs),
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    # NaN stays NaN, which torch makes 0.
    "Sign": lambda x: torch.where(x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x),
}
"""Functions of operators without attributes."""
_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
"""Klambauer et al., "Self-Normalizing Neural Networks", in FP32, as ONNX defines Selu."""
WITH_ATTRIBUTES: dict[str, Lowering] = {
    "Celu": lambda node, x: functional.celu(x, node.get("alpha", 1.0)),
    "Elu": lambda node, x: functional.elu(x, node.get("alpha", 1.0)),
    "Gelu": lambda node, x: functional.gelu(x, approximate=node.get("approximate", "none")),
    "HardSigmoid": lambda node, x: (node.get("alpha", 0.2) * x + node.get("beta", 0.5)).clamp(0, 1),
    "LeakyRelu": lambda node, x: functional.leaky_relu(x, node.get("alpha", 0.01)),
    "Mod": lambda node, a, b: torch.fmod(a, b) if node.get("fmod", 0) else torch.remainder(a, b),
    "Selu": lambda node, x: (
        node.get("gamma", _SELU_GAMMA) * functional.elu(x, node.get("alpha", _SELU_ALPHA))
    ),
    "ThresholdedRelu": lambda node, x: torch.where(x > node.get("alpha", 1.0), x, torch.zeros_like(x)),
    "Swish": lambda node, x: x * torch.sigmoid(node.get("alpha", 1.0) * x),
}
"""Functions of a node and its inputs."""
OPERATORS |= {("", op_type): Operator(lambda _, *xs, f=f: f(*xs)) for op_type, f in PLAIN.items()}
OPERATORS |= {("", op_type): Operator(function) for op_type, function in WITH_ATTRIBUTES.items()}


@operator("IsInf")
def is_inf(node: Node, x: Tensor) -> Tensor:
    """Mark infinities of the requested signs."""
    marked = torch.isinf(x)
    if not node.get("detect_positive", 1):
        marked = marked & (x < 0)
    return marked if node.get("detect_negative", 1) else marked & (x > 0)


@operator("Pow", scalars=(1,))
def power(node: Node, base: Tensor, exponent: Value) -> Tensor:
    """A power, in the type of its base."""
    # With a plain number the compiler can turn x² into x·x.
    value: Any = exponent.entries[0] if isinstance(exponent, ShapeValue) else exponent
    is_float = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
    wide = base.to(torch.float64) if is_float and not base.is_floating_point() else base
    return torch.pow(wide, value).to(base.dtype)


@operator("Div", scalars=(0, 1))
def divide(node: Node, dividend: Value, divisor: Value) -> Tensor:
    """A quotient, of integers without its fraction."""
    x, y = node.tensor(dividend), node.tensor(divisor)
    if x.is_floating_point():
        return torch.div(x, y)
    # Inductor takes an integer constant of rank 0 for a float: quotients would be floats, wrong beyond 2²⁴.
    if isinstance(divisor, ShapeValue):
        return torch.div(x, int(divisor.entries[0]), rounding_mode="trunc")
    x = torch.full_like(y, int(dividend.entries[0])) if isinstance(dividend, ShapeValue) else x
    return torch.div(x, y, rounding_mode="trunc")


@operator("Clip", scalars=(1, 2))
def clip(node: Node, x: Tensor, low: Value = None, high: Value = None) -> Tensor:
    """Values between two bounds; the upper one wins where they cross."""
    least, most = (bound.entries[0] if isinstance(bound, ShapeValue) else bound for bound in (low, high))
    x = x if least is None else x.clamp(min=least)  # type: ignore[arg-type]
    return x if most is None else x.clamp(max=most)  # type: ignore[arg-type]


@operator("Dropout", numbers=(1, 2))
def dropout(node: Node, x: Tensor, ratio: Value = None, training: Value = None) -> Any:
    """Identity at inference; the mask keeps every element."""
    return (x, torch.ones_like(x, dtype=torch.bool)) if node.wants(1) else x


@operator("Cast")
def cast(node: Node, x: Tensor) -> Tensor:
    """Another element type; FP8 saturates, as QuantizeLinear does."""
    target = TORCH_TYPES.get(node.attributes["to"])
    if target is None:
        name = TensorProto.DataType.Name(node.attributes["to"])
        raise node.error(f"a cast to {name} is not lowered", "torch has no such type here")
    return _to_type(node, x, target)


@operator("CastLike", raw=True)
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
