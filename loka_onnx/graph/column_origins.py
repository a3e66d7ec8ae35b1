"""Trace columns of a tensor to columns of the model's inputs, perhaps transformed one by one.

Reports then say "'age'" instead of "column 3 of 'joined'". The walk goes back from a tensor (batch, columns)
through nodes that keep columns apart: elementwise functions, arithmetic with constants, and joins along
columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka_onnx.graph.model import Node, Tensor, is_constant, producer

_ELEMENTWISE = frozenset(
    {"Identity", "Cast", "Abs", "Neg", "Log", "Exp", "Sqrt", "Reciprocal", "Sign", "Floor", "Ceil", "Round"}
) | {"Clip", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "Softplus"}
"""Elementwise functions of the first input."""
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"})


@dataclass(frozen=True)
class Origin:
    """A column of an input; 0 in an input (batch,)."""

    input: str
    column: int


def column_origins(tensor: Tensor) -> tuple[Origin | None, ...]:
    """Return the origin of each column; None where it is no column of one input.

    Empty unless the tensor has two axes and a fixed number of columns.
    """
    width = _width(tensor)
    if not width:
        return ()
    node = producer(tensor)
    if node is None:
        return tuple(Origin(tensor.name, column) for column in range(width))
    found = _through(node)
    return found if len(found) == width else (None,) * width


def _through(node: Node) -> tuple[Origin | None, ...]:
    """Return origins of a node's output columns, as far as its inputs are known."""
    if node.op in _ELEMENTWISE and all(map(is_constant, node.inputs[1:])):
        return column_origins(node.inputs[0])
    if node.op in _ARITHMETIC:
        varying = [tensor for tensor in node.inputs if not is_constant(tensor)]
        return column_origins(varying[0]) if len(varying) == 1 else ()
    if node.op == "Concat" and int(node.attrs.get("axis", 0)) in {1, -1}:
        return tuple(origin for tensor in node.inputs for origin in column_origins(tensor))
    if node.op == "Unsqueeze" and producer(node.inputs[0]) is None and _is_vector(node.inputs[0]):
        return (Origin(node.inputs[0].name, 0),)
    return ()


def _is_vector(tensor: Tensor) -> bool:
    return not is_constant(tensor) and tensor.shape is not None and len(tensor.shape) == 1


def _width(tensor: Tensor) -> int:
    """Columns; 0 unless the tensor has two axes and a fixed number of them."""
    if is_constant(tensor) or tensor.shape is None or len(tensor.shape) != 2:
        return 0
    width = tensor.shape[1]
    return width if isinstance(width, int) else 0
