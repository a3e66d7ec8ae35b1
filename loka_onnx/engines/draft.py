"""An ONNX graph that an engine maker reads or edits: nodes in order, constants by name, small edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.graph.naming import unused
from loka_onnx.graph.storage import read_external
from loka_onnx.sessions.model_files import reads_of

Array = npt.NDArray[Any]
Node = onnx.NodeProto
LAYOUT_OPS = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
"""Operators that move values without changing them; an optimizer may put one between a DQ and its product."""


class GraphDraft:
    """A model, which it takes over, with its main graph to edit; `folder` holds its external data."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._model, self._folder = model, folder
        graph = model.graph
        self.nodes: list[Node] = list(graph.node)
        self.constants: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.outputs = {output.name for output in graph.output}
        self._names = {name for node in self.nodes for name in (*node.input, *node.output)}
        self._names |= {*self.constants, *(value.name for value in graph.input), *self.outputs}

    def producer(self, tensor: str) -> Node | None:
        """Node that computes a tensor; None for inputs and constants."""
        return next((node for node in self.nodes if tensor in node.output), None)

    def behind_layout(self, tensor: str) -> Node | None:
        """Node that computes a tensor, ignoring changes of layout."""
        node = self.producer(tensor)
        while node is not None and node.op_type in LAYOUT_OPS:
            node = self.producer(node.input[0])
        return node

    def dequantize(self, tensor: str) -> Node | None:
        """DQ that computes a tensor directly; or None."""
        node = self.producer(tensor)
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def readers(self, tensor: str) -> list[tuple[Node, int]]:
        """Nodes that read a tensor, with the index of each input that does."""
        return [(node, i) for node in self.nodes for i, name in enumerate(node.input) if name == tensor]

    def kind(self, constant: str) -> int:
        """ONNX element type of an initializer."""
        return int(self.constants[constant].data_type)

    def values(self, constant: str) -> Array:
        """Values of an initializer, in an ml_dtypes type where NumPy has none."""
        tensor = self.constants[constant]
        if uses_external_data(tensor):
            read_external(tensor, self._folder)
        return numpy_helper.to_array(tensor)

    def quantized_kind(self, node: Node) -> int:
        """ONNX type of the values that a Q makes or a DQ reads; UNDEFINED where nothing says it."""
        is_q = node.op_type == "QuantizeLinear"
        stated = (*node.input[2:3], *(() if is_q else node.input[:1]))
        for name in (name for name in stated if name in self.constants):
            return self.kind(name)
        if is_q:
            return int(attribute(node, "output_dtype", onnx.TensorProto.UNDEFINED))
        quantize = self.behind_layout(node.input[0])
        if quantize is None or quantize.op_type != "QuantizeLinear":
            return int(onnx.TensorProto.UNDEFINED)
        return self.quantized_kind(quantize)

    def add_constant(self, name: str, values: Array) -> str:
        """Add an initializer with ``raw_data`` and return its name, which differs if it is taken; equal ones
        are shared. MIGraphX reads FP8 values in ``int32_data`` as numbers, not as bits.
        """
        data = np.ascontiguousarray(values).tobytes()
        kind = int(helper.np_dtype_to_tensor_dtype(values.dtype))
        tensor = helper.make_tensor(name, kind, values.shape, data, raw=True)
        if name in self.constants and self.constants[name] == tensor:
            return name
        tensor.name = self._fresh(name)
        self.constants[tensor.name] = tensor
        return str(tensor.name)

    def insert(self, before: Node, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node in front of another; return the name of its output."""
        node = helper.make_node(op, inputs, [self._fresh(f"{name}:0")], name, **attributes)
        self.nodes.insert(self._position(before), node)
        return str(node.output[0])

    def follow(self, node: Node, op: str, others: list[str], name: str, **attributes: Any) -> Node:
        """Add an operator behind a node: it reads the node's result, and takes over the result's name."""
        result = node.output[0]
        node.output[0] = self._fresh(f"{node.name}/bare")
        behind = helper.make_node(op, [node.output[0], *others], [result], name, **attributes)
        self.nodes.insert(self._position(node) + 1, behind)
        return behind

    def finished(self) -> onnx.ModelProto:
        """Return the model without dead nodes and without intermediate types and shapes."""
        live: list[Node] = []
        read = set(self.outputs)
        for node in reversed(self.nodes):
            if read.intersection(node.output):
                live.append(node)
                read.update(reads_of([node]))
        graph = self._model.graph
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(reversed(live))
        graph.initializer.extend(tensor for tensor in self.constants.values() if tensor.name in read)
        return self._model

    def rank(self, tensor: str) -> int | None:
        """Rank of a tensor that is no constant; None where the planned model states no shape for it."""
        graph = self._model.graph
        for value in (*graph.value_info, *graph.input, *graph.output):
            if value.name == tensor and value.type.tensor_type.HasField("shape"):
                return len(value.type.tensor_type.shape.dim)
        return None

    def _position(self, node: Node) -> int:
        return next(position for position, each in enumerate(self.nodes) if each is node)

    def _fresh(self, name: str) -> str:
        fresh = unused(name, self._names)
        self._names.add(fresh)
        return fresh


def attribute(node: Node, name: str, default: Any) -> Any:
    """Value of an attribute, or `default`."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def drop_attributes(node: Node, *names: str) -> None:
    """Remove attributes from a node."""
    for each in [each for each in node.attribute if each.name in names]:
        node.attribute.remove(each)
