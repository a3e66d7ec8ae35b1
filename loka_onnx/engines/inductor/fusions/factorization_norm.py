"""The interaction half of a factorization machine block, with its norm and the Q behind it.

With tokens X (batch, n, d) and a learned Y (n, k) (Wukong, arXiv 2403.02545, section 3)::

    Q?(LN(flatten(X · (Xᵀ · Y))))   →   one kernel that reads X once

The kernel keeps the product in FP32 for the norm; the graph rounds it in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    HALVES,
    MOST_ELEMENTS,
    DeclinedFusion,
    Findings,
    Fused,
    attributes,
    fuse_each,
    is_float8_quantize,
    made_by,
    normalizes_last_axis,
    only_reader,
    padded,
    static,
    through_casts,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor
from loka_onnx.engines.inductor.fusions.tokens import TokenMix, token_mix

OP = f"{DOMAIN}::FactorizationNorm"


def fuse_factorization_norm(graph: PlannedGraph) -> Findings:
    """Fuse every such block; see the module."""
    return fuse_each(_places(graph))


def _places(graph: PlannedGraph) -> Iterator[tuple[str, Callable[[], Fused]]]:
    for norm in list(graph.nodes):
        if norm.op != "LayerNormalization" or not norm.outputs:
            continue
        product = _interaction(norm)
        mix = None if product is None else token_mix(product.reads(1))
        if product is not None and mix is not None and through_casts(product.reads(0)) is mix.x:
            yield norm.name, partial(_fuse, graph, norm, product, mix)


def _interaction(norm: Node) -> Node | None:
    """Match the product X · P that the norm reads flattened."""
    for op in ("Reshape", "Flatten"):
        flat = made_by(norm.reads(0), op)
        if flat is not None:
            return made_by(flat.reads(0), "MatMul")
    return None


def _fuse(graph: PlannedGraph, norm: Node, product: Node, mix: TokenMix) -> Fused:
    x, (n, k) = mix.x, mix.weight.shape
    lengths = static(x, 3)
    if lengths is None or lengths[0] != n:
        raise DeclinedFusion("the shape of the tokens is not known")
    if x.kind not in HALVES:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    if product.outputs[0].kind != x.kind:
        raise DeclinedFusion("the plan keeps the product in FP32")
    if not normalizes_last_axis(norm, (None, n * k)):
        raise DeclinedFusion("it does not normalize over all of the flattened product, and that alone")
    d = lengths[1]
    if padded(n) * max(padded(d), padded(k)) > MOST_ELEMENTS or padded(d) * padded(k) > MOST_ELEMENTS:
        raise DeclinedFusion(f"{n}×{d} tokens and rank {k} are too large for one program")
    affine = [tensor for tensor in norm.inputs[1:] if tensor is not None]
    if not all(tensor.is_constant and tensor.values.size == n * k for tensor in affine):
        raise DeclinedFusion("it does not normalize over all of the flattened product")
    scale = affine[0].values
    shift = affine[1].values if len(affine) > 1 else np.zeros_like(scale)
    name = graph.fresh_name(f"{norm.name}/factorization")
    weight = np.ascontiguousarray(mix.weight)
    inputs = [
        x,
        graph.constant(f"{name}.y", weight),
        graph.constant(f"{name}.gamma", scale.reshape(-1)),
        graph.constant(f"{name}.beta", shift.reshape(-1)),
    ]
    products = (mix.product.name, product.name)
    attrs = attributes(norm, products)
    replaced, quantize = _end(graph, norm, x)
    if quantize is not None:
        inputs.append(quantize.reads(1))
    graph.replace(OP, name, inputs, [replaced], attrs)
    return Fused(name, (*products, norm.name))


def _end(graph: PlannedGraph, norm: Node, x: Tensor) -> tuple[Tensor, Node | None]:
    """Return the tensor that replaces the norm's output (of a Q or a cast behind it, or itself), and the
    Q.
    """
    out = norm.outputs[0]
    reader = only_reader(graph, out)
    if reader is not None and reader.op == "Cast" and reader.outputs[0].kind == x.kind:
        out = reader.outputs[0]
        reader = only_reader(graph, out)
    if reader is not None and is_float8_quantize(reader):
        return reader.outputs[0], reader
    if out.kind != x.kind:
        raise DeclinedFusion("its output is read in another precision than that of the tokens")
    return out, None
