"""Which columns of a tensor are columns of the model's inputs, perhaps transformed one by one.

For a reader: "column 3 of 'joined'" says little, "'age'" says where to look. The walk goes back from a tensor
(batch, columns) through nodes that keep columns apart: functions of each element, arithmetic with constants,
and joining along the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka_onnx.graph.model import Node, Tensor, is_constant, producer

_ELEMENTWISE = frozenset(
    {"Identity", "Cast", "Abs", "Neg", "Log", "Exp", "Sqrt", "Reciprocal", "Sign", "Floor", "Ceil", "Round"}
) | {"Clip", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "Softplus"}
"""Functions of the first input, element by element."""
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"})


@dataclass(frozen=True)
class Origin:
    """A column of an input.

    Attributes:
        input: Name of the input.
        column: Position; 0 in an input (batch,).
    """

    input: str
    column: int


def column_origins(tensor: Tensor) -> tuple[Origin | None, ...]:
    """Where each column comes from; None where it is no column of one input.

    Args:
        tensor: An activation or an input.

    Returns:
        One entry for each column; empty unless the tensor has two axes and a fixed number of columns.
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
    """Origins of the columns of a node's output, as far as its inputs tell."""
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
