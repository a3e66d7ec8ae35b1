"""What joins the inputs of a dense part, with the Q behind it.

    X  =  concat(A, B),    X, Q(X)

of two matrices side by side, rounded to the type of X as they are read. Inductor makes one kernel of it as
well, which took 35 µs in place of 15 without the Q (DLRM-DCNv2 at 2048 on an H100, where X is x0 of every
cross layer); why was not found. This one was not timed on a GPU yet.
"""

from __future__ import annotations

import onnx

from loka_onnx.engines.inductor.fusions.base import DOMAIN, HALVES, DeclinedFusion, Findings, Fused, static
from loka_onnx.engines.inductor.fusions.epilogue import ends_of
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

OP = f"{DOMAIN}::ConcatQuantize"


def fuse_concat_quantize(graph: PlannedGraph) -> Findings:
    """Fuse every such concatenation; see the module."""
    found = Findings([], [])
    for node in list(graph.nodes):
        if (
            node.op != "Concat"
            or node.domain
            or not node.outputs
            or not ends_of(graph, node.outputs[0]).quantize
        ):
            continue
        try:
            found.fused.append(_fuse(graph, node))
        except DeclinedFusion as reason:
            found.declined.append(f"{node.name}: {reason}")
    return found


def _fuse(graph: PlannedGraph, node: Node) -> Fused:
    joined = node.outputs[0]
    if joined.kind not in HALVES:
        raise DeclinedFusion("the kernel writes BF16 and FP16")
    if len(node.inputs) != 2:
        raise DeclinedFusion(f"it joins {len(node.inputs)} tensors, the kernel two")
    parts = [node.reads(0), node.reads(1)]
    if static(joined, 2) is None or any(static(part, 2) is None for part in parts):
        raise DeclinedFusion("what it joins are not matrices of known widths")
    if node.attrs.get("axis") not in {1, -1} or any(part.is_constant for part in parts):
        raise DeclinedFusion("it does not join computed columns")
    ends = ends_of(graph, joined)
    inputs = [*(_unrounded(graph, part) for part in parts), ends.scale]
    name = graph.fresh_name(f"{node.name}/quantized")
    attrs = {"wide": int(ends.wide), "base": joined.kind}
    graph.replace(OP, name, inputs, ends.replaced(joined), attrs)
    return Fused(name)


def _unrounded(graph: PlannedGraph, tensor: Tensor) -> Tensor:
    """The FP32 values that a tensor is rounded from, in its shape: the kernel rounds as it reads.

    Itself where it is not rounded just before.
    """
    node = tensor.producer
    if node is None or node.domain or node.op not in {"Cast", "Reshape"} or tensor.kind not in HALVES:
        return tensor
    source = node.reads(0)
    if node.op == "Cast":
        return source if source.kind == onnx.TensorProto.FLOAT else tensor
    wide = _unrounded(graph, source)
    if wide is source:
        return tensor
    reshaped = Tensor(graph.fresh_name(f"{tensor.name}.float"), wide.kind, tensor.shape)
    graph.replace(
        "::Reshape", graph.fresh_name(f"{node.name}/float"), [wide, node.reads(1)], [reshaped], node.attrs
    )
    return reshaped
