"""Write a weight times a column vector as a row times the weight, which is a linear layer.

Low-rank crosses and their experts (DCN-Mix, arXiv 2008.13535) keep features as columns (batch, K, 1)::

    W · x   =   (xᵀ · Wᵀ)ᵀ        W (N, K), x (batch, …, K, 1)

Libraries run the left side as a batched product of matrices with vectors, whose weight is read once a row of
the batch, and no kernel takes it in 8 bits. The right side is one product of (batch, K) and (K, N).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, values_of
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod, find

_POINTWISE = frozenset({"Relu", "Tanh", "Sigmoid", "LeakyRelu", "Elu", "Gelu", "Softplus", "Identity"})
_WITH_CONSTANT = frozenset({"Add", "Sub", "Mul", "Div"})


@dataclass(frozen=True)
class ColumnProduct:
    """A MatMul of a constant matrix and columns of length 1, and what follows it element by element."""

    node: Node
    following: tuple[Node, ...]


class ColumnToRow(Mod[ColumnProduct]):
    """MatMul of a constant (N, K) and (batch, …, K, 1) → Squeeze, MatMul, Unsqueeze behind its bias."""

    name = "column-to-row"

    def _find(self, model: GraphModel) -> Iterator[ColumnProduct | Declined]:
        outputs = {id(tensor) for tensor in model.outputs}
        products = (node for node in model.nodes if node.op == "MatMul")
        return find(products, lambda node: _read(node, outputs))

    def rewrite(self, model: GraphModel, match: ColumnProduct) -> Applied:
        """Replace the product by one of the same name with the weight on the right."""
        node = match.node
        weight, columns = node.inputs
        name = str(node.name)
        model.rename(node, f"{name}/left")
        axis = model.constant(f"{name}.axis", np.array([-1], np.int64))
        turned = model.constant(f"{weight.name}.turned", np.ascontiguousarray(values_of(weight).T))
        rows = model.add("Squeeze", [columns, axis], f"{name}/row", columns.dtype)
        result = model.add("MatMul", [rows, turned], f"{name}/matmul", node.outputs[0].dtype)
        site, last = result.inputs[0], node.outputs[0]
        for step in match.following:
            inputs = [result if tensor is last else _row(model, tensor) for tensor in step.inputs]
            result, last = model.add_like(step, inputs, str(step.name)), step.outputs[0]
        model.hand_over(last, model.add("Unsqueeze", [result, axis], f"{name}/column", last.dtype))
        model.rename(site, name)
        n, k = values_of(weight).shape
        return Applied(site.name, f"weight ({n}, {k}) on the left of columns → on the right of rows")


def _read(node: Node, outputs: Collection[int]) -> ColumnProduct | None:
    weight, columns = node.inputs
    shape = static_shape(columns)
    if len(shape) < 3 or shape[-1] != 1 or not is_constant(weight) or len(static_shape(weight)) != 2:
        return None
    following: list[Node] = []
    tensor = node.outputs[0]
    while (
        id(tensor) not in outputs and len(readers := consumers(tensor)) == 1 and _follows(readers[0], tensor)
    ):
        following.append(readers[0])
        tensor = readers[0].outputs[0]
    return ColumnProduct(node, tuple(following))


def _follows(node: Node, tensor: Tensor) -> bool:
    """Return whether a node works element by element, with constants that are columns or numbers."""
    if node.op in _POINTWISE:
        return True
    others = [other for other in node.inputs if other is not tensor]
    rank = len(static_shape(tensor))
    return (
        node.op in _WITH_CONSTANT
        and len(others) == 1
        and is_constant(others[0])
        and (values_of(others[0]).size == 1 or values_of(others[0]).shape[-1] == 1)
        and values_of(others[0]).ndim <= rank
    )


def _row(model: GraphModel, constant: Tensor) -> Tensor:
    values = values_of(constant)
    row = values.reshape(values.shape[:-1])
    return model.constant(f"{constant.name}.row", row) if values.ndim else constant
