"""Write a gated sum of parallel linears as one linear over all of them.

Mixtures of low-rank crosses (DCN-Mix, arXiv 2008.13535) stack what E experts give as columns (batch, N, E)
and multiply by the gates (batch, E, 1). With vₑ (batch, K), Wₑ (K, N) and one b for all::

    Σₑ gₑ (vₑ Wₑ + b) ⊙ x   =   ([g₁ v₁ … g_E v_E] · [W₁; …; W_E] + b Σₑ gₑ) ⊙ x

The left side writes and reads E·N numbers a row around a product of E; the right side is one product of E·K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer
from loka_onnx.graph.naming import merged_name
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import (
    Linear,
    constant_at,
    is_along_last,
    is_candidate,
    made_by,
    read_linear,
)


@dataclass(frozen=True)
class Experts:
    """A MatMul of stacked columns with gates; `factor` is what multiplies every column, None for nothing."""

    node: Node
    layers: tuple[Linear, ...]
    factor: Tensor | None


class SumExperts(Mod[Experts]):
    """MatMul of a Concat of linears' columns and gates → one linear of the gated activations."""

    name = "sum-experts"

    def _find(self, model: GraphModel) -> Iterator[Experts | Declined]:
        products = (node for node in model.nodes if node.op == "MatMul" and not is_candidate(node))
        return find(products, lambda node: _read(model, node))

    def rewrite(self, model: GraphModel, match: Experts) -> Applied:
        """Replace a match by one linear: gate the experts' inputs, add b · Σ gates, apply the factor."""
        node, layers = match.node, match.layers
        gates, first, count = node.inputs[1], match.layers[0], len(match.layers)
        names = (*(str(layer.node.name) for layer in layers), str(node.name))
        name = merged_name(names[:-1])
        rows = model.add("Concat", [layer.source for layer in layers], f"{name}/concat", attrs={"axis": -1})
        apart = model.constant(f"{name}.apart", np.array([0, count, first.k], np.int64))
        together = model.constant(f"{name}.together", np.array([0, count * first.k], np.int64))
        scaled = model.add(
            "Mul", [model.add("Reshape", [rows, apart], f"{name}/apart"), gates], f"{name}/gated"
        )
        scaled = model.add("Reshape", [scaled, together], f"{name}/together")
        weight = model.constant(f"{name}.weight", np.concatenate([layer.weight_kn() for layer in layers]))
        result = model.add("MatMul", [scaled, weight], f"{name}/matmul", node.outputs[0].dtype)
        site = result.inputs[0]
        last = model.constant(f"{name}.axis", np.array([-1], np.int64))
        if (bias := first.bias_n()).any():
            shift = model.constant(f"{name}.bias", bias)
            if not _sum_to_one(gates):
                row = model.add("Squeeze", [gates, last], f"{name}/gates")
                total = model.add("ReduceSum", [row, last], f"{name}/total", attrs={"keepdims": 1})
                shift = model.add("Mul", [total, shift], f"{name}/shift")
            result = model.add("Add", [result, shift], f"{name}/add")
        result = model.add("Unsqueeze", [result, last], f"{name}/column")
        if match.factor is not None:
            result = model.add("Mul", [match.factor, result], f"{name}/factor")
        model.hand_over(node.outputs[0], result)
        model.rename(site, name)
        what = f"gated sum of {count} linears {first.k} → {first.n} → one of K = {count * first.k}"
        return Applied(site.name, what, {site.name: names})


def _read(model: GraphModel, node: Node) -> Experts | None:
    stack, gates = node.inputs
    concat = made_by(stack, "Concat")
    if concat is None or len(static_shape(stack)) != 3 or not is_along_last(concat, stack):
        return None
    count = len(concat.inputs)
    if count < 2 or static_shape(gates)[-2:] != (count, 1) or model.only_reader(stack) is not node:
        return None
    parts = [(part, producer(part)) for part in concat.inputs]
    factor = None
    if all(maker is not None and maker.op == "Mul" for _, maker in parts):
        makers = [maker for _, maker in parts if maker is not None]
        factor = next((t for t in makers[0].inputs if all(_holds(maker, t) for maker in makers)), None)
        if factor is None or static_shape(factor)[1:] != (*static_shape(stack)[1:2], 1):
            return None
        columns = [next(t for t in maker.inputs if t is not factor) for maker in makers]
    else:
        columns = list(concat.inputs)
    layers = [_layer(model, column) for column in columns]
    if not all(model.only_reader(part) is concat for part in concat.inputs):
        raise NotRewritten("a column of an expert has another reader")
    if any((layer.k, layer.n) != (layers[0].k, layers[0].n) for layer in layers):
        raise NotRewritten("its experts differ in width")
    if any((layer.bias_n() != layers[0].bias_n()).any() for layer in layers):
        raise NotRewritten("its experts have different biases")
    return Experts(node, tuple(layers), factor)


def _holds(node: Node, tensor: Tensor) -> bool:
    return sum(each is tensor for each in node.inputs) == 1


def _layer(model: GraphModel, column: Tensor) -> Linear:
    """The linear of rows whose result stands as a column (batch, N, 1)."""
    unsqueeze = made_by(column, "Unsqueeze")
    axes = None if unsqueeze is None else constant_at(unsqueeze, 1)
    if unsqueeze is None or axes is None or axes.tolist() not in ([-1], [2]):
        raise NotRewritten("what it sums are no columns of rows")
    result = unsqueeze.inputs[0]
    maker = producer(result)
    if maker is not None and maker.op == "Add":
        maker = next((producer(t) for t in maker.inputs if not is_constant(t)), None)
    if maker is None or not is_candidate(maker):
        raise NotRewritten("what it sums are not linears")
    layer = read_linear(model, maker)
    if layer.on_left or layer.result is not result or len(static_shape(layer.source)) != 2:
        raise NotRewritten("an expert is more than one linear of rows, or its result has other readers")
    if model.only_reader(result) is not unsqueeze:
        raise NotRewritten("the result of an expert has another reader")
    return layer


def _sum_to_one(gates: Tensor) -> bool:
    """Return whether gates (batch, E, 1) are a Softmax over the experts."""
    node = made_by(gates, "Softmax")
    return node is not None and int(node.attrs.get("axis", -1)) in (1, -2)
