"""Comparisons, logic, and the choice between two tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import OPERATORS

Tensor = torch.Tensor

PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
}


def _register_pairs() -> None:
    for op_type, compare in PAIRS.items():
        OPERATORS.operator(op_type)(lambda node, a, b, function=compare: function(a, b))


_register_pairs()


@OPERATORS.operator("Not")
def logical_not(node: Node, x: Tensor) -> Tensor:
    """Logical complement."""
    return torch.logical_not(x)


@OPERATORS.operator("Where")
def where(node: Node, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Select from two tensors by element."""
    return torch.where(condition, yes, no)


@OPERATORS.operator("IsNaN")
def is_nan(node: Node, x: Tensor) -> Tensor:
    """Mark NaN."""
    return torch.isnan(x)


@OPERATORS.operator("IsInf")
def is_inf(node: Node, x: Tensor) -> Tensor:
    """Mark infinities of the requested signs."""
    found = torch.isinf(x)
    if not node.get("detect_positive", 1):
        found = found & (x < 0)
    return found if node.get("detect_negative", 1) else found & (x > 0)
