"""Form of a model in which TensorRT for RTX keeps a merged query, key and value as one FP8 product.

Sites that share an input are one product and a Split of its columns, and attention reads each part by heads::

    q, k, v = Split(p),  H·D columns each;     Reshape(q) : (…, H, D),  …

Behind FP8 with a scale per output channel, the compiler (1.7.1) cuts that product along the parts and their
scales, and multiplies in the base precision. It does not when the columns are split by heads, which is the
same movement of values::

    Split(Reshape(p) : (…, ΣH, D)),  H heads each

The Reshapes behind it then change nothing. Attention stays one kernel, and the kernel that applies the
product's scales reads the parts. Built engines confirm that the product runs in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True)
class _Heads:
    """A Split whose parts are read by heads.

    Attributes:
        lead: Sizes in front of the heads, from the Reshapes.
        counts: Heads of each part.
    """

    lead: tuple[int, ...]
    counts: tuple[int, ...]
    width: int


def split_by_heads(model: onnx.ModelProto) -> tuple[str, ...]:
    """Split merged FP8 products by heads where all parts are read so; edits the model and returns the Split
    nodes' names.
    """
    graph = model.graph
    found = _Graph(graph)
    nodes: list[onnx.NodeProto] = []
    changed: list[str] = []
    for original in graph.node:
        heads = found.heads_behind(original) if original.op_type == "Split" else None
        if heads is None:
            nodes.append(original)
            continue
        name = original.name or original.output[0]
        shape, sizes = f"{name}/by_heads/shape", f"{name}/by_heads/sizes"
        for constant, values in (
            (shape, (*heads.lead, sum(heads.counts), heads.width)),
            (sizes, heads.counts),
        ):
            graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), constant))
        by_heads = f"{name}/by_heads/rows"
        nodes.append(helper.make_node("Reshape", [original.input[0], shape], [by_heads], f"{name}/by_heads"))
        axis = len(heads.lead)
        nodes.append(helper.make_node("Split", [by_heads, sizes], list(original.output), name, axis=axis))
        changed.append(name)
    if changed:
        parts = {output for node in nodes if node.name in changed for output in node.output}
        kept = [info for info in graph.value_info if info.name not in parts]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)
        graph.value_info.extend(kept)
    return tuple(changed)


class _Graph:
    """Constants, producers and readers of tensors."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._outputs = {output.name for output in graph.output}
        self._integers = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in graph.initializer
            if tensor.data_type == onnx.TensorProto.INT64
        }
        self._makers = {output: node for node in graph.node for output in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for tensor in set(node.input):
                self._readers.setdefault(tensor, []).append(node)

    def heads_behind(self, split: onnx.NodeProto) -> _Heads | None:
        """Match the heads of a merged FP8 product; None unless all parts are read by heads of one width."""
        if not self._is_float8_product(split.input[0]):
            return None
        shapes = [self._shape_behind(part) for part in split.output]
        sizes = self._sizes(split)
        if sizes is None or any(shape is None or len(shape) < 3 for shape in shapes):
            return None
        known: list[tuple[int, ...]] = [shape for shape in shapes if shape is not None]
        lead, width = known[0][:-2], known[0][-1]
        counts = tuple(shape[-2] for shape in known)
        alike = all(shape[:-2] == lead and shape[-1] == width for shape in known)
        fits = all(count > 0 and count * width == size for count, size in zip(counts, sizes, strict=True))
        if not (alike and fits and width > 0 and _keeps_rows(split, lead)):
            return None
        return _Heads(lead, counts, width)

    def _is_float8_product(self, tensor: str) -> bool:
        maker = self._makers.get(tensor)
        if maker is None or maker.op_type not in PRODUCTS or tensor in self._outputs:
            return False
        operands = [self._makers.get(operand) for operand in maker.input[:2]]
        return all(node is not None and node.op_type == "DequantizeLinear" for node in operands)

    def _sizes(self, split: onnx.NodeProto) -> list[int] | None:
        if len(split.input) < 2 or split.input[1] not in self._integers:
            return None
        return [int(size) for size in self._integers[split.input[1]]]

    def _shape_behind(self, part: str) -> tuple[int, ...] | None:
        """Constant shape from the only reader of a part; or None."""
        readers = self._readers.get(part, [])
        if part in self._outputs or len(readers) != 1 or readers[0].op_type != "Reshape":
            return None
        reader = readers[0]
        if any(attribute.name == "allowzero" and attribute.i for attribute in reader.attribute):
            return None
        shape = self._integers.get(reader.input[1])
        return None if shape is None else tuple(int(size) for size in shape)


def _keeps_rows(split: onnx.NodeProto, lead: Sequence[int]) -> bool:
    """Tell whether the Split cuts the last axis, and `lead` is valid for the whole as for a part.

    A -1 follows from the rest, which is in proportion. A 0 copies the size of an axis, which must not be the
    cut one; the last axis of a product is not its first.
    """
    axis = next((attribute.i for attribute in split.attribute if attribute.name == "axis"), 0)
    if axis == -1:
        return 0 not in lead[1:]
    return axis == len(lead)
