"""Write a linear of one input channel elementwise: an embedding of a number, as rankers have one a feature.

With K = 1 no sum is left in the product::

    x · W + b   =   x ⊙ w + b        x (…, M, 1), w the only row of W (1, N), broadcast over M

Libraries launch a kernel a feature for it, and a cast in front of it where the number comes in FP32: 16 of 46
launches of fuxictr-finalmlp, 33 of 134 µs at 2048 (sm90). Elementwise, it is computed with its reader.
"""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod, find
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, read_linear


class OuterToMul(Mod[Linear]):
    """MatMul or Gemm of (…, M, 1) and a constant (1, N) → Mul, and Add of a Gemm's bias."""

    name = "outer-to-mul"

    def _find(self, model: GraphModel) -> Iterator[Linear | Declined]:
        return find(filter(is_candidate, model.nodes), lambda node: _read(model, node))

    def rewrite(self, model: GraphModel, match: Linear) -> Applied:
        """Replace the product by a Mul, and an Add where a Gemm has a bias. An Add behind the product stays,
        unless it adds zeros.
        """
        node, name = match.node, str(match.node.name)
        dtype = node.outputs[0].dtype
        row = model.constant(f"{match.weight.name}.row", match.weight_kn().reshape(-1))
        result = model.add("Mul", [match.source, row], f"{name}/mul", dtype)
        bias = match.bias if match.bias_n().any() else None
        if bias is not None and match.add is None:
            result = model.add("Add", [result, bias], f"{name}/add", dtype)
        model.hand_over(match.result if bias is None else node.outputs[0], result)
        return Applied(name, f"a product of one input channel and {match.n} → elementwise")


def _read(model: GraphModel, node: Node) -> Linear | None:
    if 1 not in static_shape(node.inputs[1]):
        return None
    linear = read_linear(model, node)
    return linear if linear.k == 1 and not linear.on_left else None
