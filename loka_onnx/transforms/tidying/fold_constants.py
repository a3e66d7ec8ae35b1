"""Compute constant subgraphs once, by ONNX Runtime with every optimization off, and store the result.

Left alone are results larger than `GROWTH` times their inputs, results of an embedding table that a lookup
reads (it would be stored twice), intended low precision, random operators and control flow, and results that
leave the graph: engines expect outputs to be computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant
from loka_onnx.graph.parts import DRAWING
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.sessions.onnx_session import import_onnxruntime
from loka_onnx.transforms.base import Mod, NotRewritten

NEVER_FOLDED = DRAWING | {
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    *("If", "Loop", "Scan", "SequenceMap"),
}
GROWTH = 4.0
"""Largest size of a result, relative to its node's inputs."""
SMALL_BYTES = 4096
"""A result of this size is always stored."""
LARGEST_BYTES = 1 << 30
"""Most bytes of constants given to ONNX Runtime: protobuf ends at 2 GiB."""
_NUMPY_TYPES = frozenset(
    element_type(kind) for kind in (np.float32, np.float64, np.float16, np.int32, np.int64, np.bool_)
)


@dataclass(frozen=True)
class Constant:
    """A computed tensor that is the same for every row."""

    tensor: Tensor
    values: npt.NDArray[Any]


class FoldConstants(Mod[Constant]):
    """Constant subgraphs → initializers."""

    name = "fold-constants"

    def _find(self, model: GraphModel) -> Iterator[Constant | Declined]:
        variable: set[int] = {id(tensor) for tensor in model.inputs}
        constant: dict[int, Node] = {}
        for node in model.sorted_nodes():
            if _is_foldable(model, node, variable):
                reason = _why_not(node)
                if not reason:
                    constant[id(node)] = node
                    continue
                yield Declined(node.name, reason)
            variable |= {id(tensor) for tensor in node.outputs}
        ends: list[Tensor] = []
        for node in constant.values():
            for tensor in node.outputs:
                if model.is_output(tensor):
                    yield Declined(node.name, "its result leaves the graph")
                elif any(id(reader) not in constant for reader in tensor.outputs):
                    ends.append(tensor)
        try:
            values = _compute(model, ends) if ends else []
        except NotRewritten as error:
            yield from (Declined(tensor.inputs[0].name, str(error)) for tensor in ends)
        else:
            yield from map(Constant, ends, values)

    def rewrite(self, model: GraphModel, match: Constant) -> Applied:
        """Let the readers of the tensor read an initializer; its maker goes when the graph is saved."""
        op = match.tensor.inputs[0].op
        folded = model.constant(f"{match.tensor.name}.folded", match.values)
        model.replace_uses(match.tensor, folded)
        shape = "×".join(str(d) for d in match.values.shape) or "one"
        return Applied(folded.name, f"{op} of constants → {shape} values")


def _is_foldable(model: GraphModel, node: Node, variable: set[int]) -> bool:
    if node.op in NEVER_FOLDED or any(isinstance(value, type(model.graph)) for value in node.attrs.values()):
        return False
    return not any(id(tensor) in variable or model.is_table(tensor) for tensor in node.inputs)


def _why_not(node: Node) -> str:
    """Return why a constant node stays; empty when it is folded."""
    for tensor in node.inputs:
        if is_constant(tensor) and any(
            reader.op == "Gather" and reader.inputs[0] is tensor and not is_constant(reader.inputs[1])
            for reader in tensor.outputs
        ):
            return f"made of the embedding table '{tensor.name}', which would be stored twice"
    sizes = [_bytes(tensor) for tensor in node.outputs]
    if None in sizes:
        return "the type or the shape of its result is not known"
    made_of = sum(_bytes(tensor) or 0 for tensor in node.inputs)
    result = sum(size or 0 for size in sizes)
    if result > max(SMALL_BYTES, GROWTH * made_of):
        return f"its result takes {result} bytes, what it is made of {made_of}"
    return ""


def _bytes(tensor: Tensor) -> int | None:
    """Return the size of a tensor; None where type or shape are unknown or not NumPy's."""
    if not tensor.name:
        return 0
    if tensor.dtype is None or tensor.shape is None or element_type(tensor.dtype) not in _NUMPY_TYPES:
        return None
    shape = static_shape(tensor)
    if None in shape:
        return None
    kind = onnx.helper.tensor_dtype_to_np_dtype(element_type(tensor.dtype))
    return prod(d or 0 for d in shape) * kind.itemsize


def _compute(model: GraphModel, ends: list[Tensor]) -> list[npt.NDArray[Any]]:
    """Return values of constant tensors."""
    stays = "ONNX Runtime does not compute it"
    part = model.extract((), ends)
    made_of = sum(_bytes(tensor) or 0 for tensor in part.tensors().values() if is_constant(tensor))
    if made_of > LARGEST_BYTES:
        raise NotRewritten(
            f"{stays}: it is made of {made_of} bytes, more than {LARGEST_BYTES} are not handed over"
        )
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(
            part.to_proto().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return list(session.run([tensor.name for tensor in ends], {}))
    except Exception as error:
        # onnxruntime raises unrelated extension types here.
        raise NotRewritten(f"{stays}: {str(error).splitlines()[0][:200]}") from error
