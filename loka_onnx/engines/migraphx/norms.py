"""Decomposition of norms that MIGraphX's parser lacks."""

from __future__ import annotations

import numpy as np
import onnx

from loka_onnx.engines.migraphx.draft import GraphDraft, attribute
from loka_onnx.errors import ModelError

FLOAT = int(onnx.TensorProto.FLOAT)


def decompose_rms_norms(draft: GraphDraft) -> None:
    """Decompose RMSNormalization as ONNX defines it, statistics in FP32 (operator set 23, function body).

    ::

        y = x / √(mean(x²) + ε) · scale        the mean over the axes from `axis` on

    x is cast to FP32 before it is squared, and the quotient back afterwards, as `stash_type` says; the scale
    is multiplied in the graph's own type. MIGraphX parses LayerNormalization, but not RMSNormalization.

    Raises:
        ModelError: The statistics are not FP32, or the axes are unknown.
    """
    for node in list(draft.nodes):
        if node.op_type == "RMSNormalization":
            _decompose(draft, node)


def _decompose(draft: GraphDraft, node: onnx.NodeProto) -> None:
    x, scale = node.input[0], node.input[1]
    if attribute(node, "stash_type", FLOAT) != FLOAT or not draft.is_constant(scale):
        raise ModelError(
            "an RMSNormalization cannot be decomposed",
            where=f"node '{node.name}'",
            evidence="its statistics are not FP32, or its scale is computed",
            remedy="keep the statistics in FP32 (stash_type 1) and the scale a constant",
        )
    kind, axes = draft.kind(scale), _axes(draft, node)
    name = node.name

    def add(op: str, inputs: list[str], what: str, **attributes: int) -> str:
        return draft.insert(node, op, inputs, f"{name}/{what}", **attributes)

    def number(what: str, value: float) -> str:
        return draft.add_constant(f"{name}/{what}", np.array(value, np.float32))

    wide = x if kind == FLOAT else add("Cast", [x], "to_fp32", to=FLOAT)
    squared = add("Mul", [wide, wide], "squared")
    along = draft.add_constant(f"{name}/axes", np.array(axes, np.int64))
    mean = add("ReduceMean", [squared, along], "mean", keepdims=1)
    shifted = add("Add", [mean, number("epsilon", attribute(node, "epsilon", 1e-5))], "shifted")
    normed = add("Div", [wide, add("Sqrt", [shifted], "root")], "normed")
    if kind != FLOAT:
        normed = add("Cast", [normed], "to_base", to=kind)
    # The last operator keeps the norm's name, which identifies its site.
    node.op_type = "Mul"
    del node.attribute[:]
    node.input[0] = normed


def _axes(draft: GraphDraft, node: onnx.NodeProto) -> list[int]:
    axis = int(attribute(node, "axis", -1))
    if axis < 0:
        return list(range(axis, 0))
    rank = draft.rank(node.input[0])
    if rank is None:
        raise ModelError(
            "the axes of an RMSNormalization cannot be told",
            where=f"node '{node.name}'",
            evidence=f"axis {axis} of a tensor of unknown rank",
            remedy="count the axis from the end, as in axis=-1",
        )
    return list(range(axis - rank, 0))
