"""Token mixers with the norm behind them (Wukong, arXiv 2403.02545, section 3).

The interaction half of a factorization machine block, with tokens X (batch, n, d) and a learned Y (n, k), and
the Q behind it::

    Q?(LN(flatten(X · (Xᵀ · Y))))   →   one kernel that reads X once

A residual block over tokens, with the block's own tokens F (batch, n_F, d) and W (n_L, n), n_F + n_L = n::

    LN(concat(F, W · X) + X)   →   one kernel that reads X and F once

The kernels keep the product and the sums in FP32 for the norm; the graph rounds them in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    HALVES,
    MOST_ELEMENTS,
    DeclinedFusion,
    Fused,
    Match,
    TokenMix,
    is_float8_quantize,
    made_by,
    only_reader,
    padded,
    static,
    through_casts,
    token_mix,
    untransposed,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor


def factorization_norms(graph: PlannedGraph) -> Iterator[Match]:
    """Interactions with their norm."""
    for norm in _norms(graph):
        product = _interaction(norm)
        mix = None if product is None else token_mix(product.reads(1))
        if product is not None and mix is not None and through_casts(product.reads(0)) is mix.x:
            yield norm.name, partial(_fuse_factorization, graph, norm, product, mix)


def token_residual_norms(graph: PlannedGraph) -> Iterator[Match]:
    """Residual blocks with their norm."""
    for norm in _norms(graph):
        block = _residual(norm)
        if block is not None:
            yield norm.name, partial(_fuse_residual, graph, norm, *block)


def _norms(graph: PlannedGraph) -> Iterator[Node]:
    return (node for node in list(graph.nodes) if node.op == "LayerNormalization" and node.outputs)


def _interaction(norm: Node) -> Node | None:
    """Match the product X · P that the norm reads flattened."""
    for op in ("Reshape", "Flatten"):
        flat = made_by(norm.reads(0), op)
        if flat is not None:
            return made_by(flat.reads(0), "MatMul")
    return None


def _fuse_factorization(graph: PlannedGraph, norm: Node, product: Node, mix: TokenMix) -> Fused:
    x, (n, k) = mix.x, mix.weight.shape
    lengths = static(x, 3)
    if lengths is None or lengths[0] != n:
        raise DeclinedFusion("the shape of the tokens is not known")
    if x.kind not in HALVES:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    if product.outputs[0].kind != x.kind:
        raise DeclinedFusion("the plan keeps the product in FP32")
    if not _normalizes_last_axis(norm, (None, n * k)):
        raise DeclinedFusion("it does not normalize over all of the flattened product, and that alone")
    d = lengths[1]
    if padded(n) * max(padded(d), padded(k)) > MOST_ELEMENTS or padded(d) * padded(k) > MOST_ELEMENTS:
        raise DeclinedFusion(f"{n}×{d} tokens and rank {k} are too large for one program")
    name = graph.fresh_name(f"{norm.name}/factorization")
    weight = graph.constant(f"{name}.y", np.ascontiguousarray(mix.weight))
    inputs = [x, weight, *_affine(graph, norm, name, n * k)]
    out = _rounded_output(graph, norm, x)
    reader = only_reader(graph, out)
    if reader is not None and is_float8_quantize(reader):
        out = reader.outputs[0]
        inputs.append(reader.reads(1))
    elif out.kind != x.kind:
        raise DeclinedFusion("its output is read in another precision than that of the tokens")
    products = (mix.product.name, product.name)
    graph.replace(f"{DOMAIN}::FactorizationNorm", name, inputs, [out], _attributes(norm, products))
    return Fused(name, (*products, norm.name))


def _residual(norm: Node) -> tuple[Tensor, TokenMix] | None:
    """Match F and W · X of the sum that a norm reads."""
    total = made_by(norm.reads(0), "Add")
    if total is None:
        return None
    both = (total.reads(0), total.reads(1))
    for joined, residual in (both, both[::-1]):
        concat = made_by(joined, "Concat")
        if concat is None or len(concat.inputs) != 2 or concat.attrs.get("axis") not in {1, -2}:
            continue
        mixed = untransposed(concat.reads(1))
        mix = None if mixed is None else token_mix(mixed)
        if mix is not None and mix.x is through_casts(residual):
            return through_casts(concat.reads(0)), mix
    return None


def _fuse_residual(graph: PlannedGraph, norm: Node, own: Tensor, mix: TokenMix) -> Fused:
    x, (n, later) = mix.x, mix.weight.shape
    lengths, first = static(x, 3), static(own, 3)
    if lengths is None or first is None or lengths[0] != n or first != (n - later, lengths[1]):
        raise DeclinedFusion("the shape of the tokens is not known, or is another behind the block")
    if x.kind not in HALVES or own.kind != x.kind:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    d = lengths[1]
    if not _normalizes_last_axis(norm, (None, n, d)):
        raise DeclinedFusion("it does not normalize each token, and that alone")
    if max(padded(n), padded(later)) * padded(d) > MOST_ELEMENTS or padded(n) * padded(later) > MOST_ELEMENTS:
        raise DeclinedFusion(f"{n}×{d} tokens are too large for one program")
    name = graph.fresh_name(f"{norm.name}/residual")
    weight = graph.constant(f"{name}.w", np.ascontiguousarray(mix.weight.T))
    inputs = [x, own, weight, *_affine(graph, norm, name, d)]
    out = _rounded_output(graph, norm, x)
    if out.kind != x.kind:
        raise DeclinedFusion("its output is read in another precision than that of the tokens")
    attrs = _attributes(norm, (mix.product.name,))
    graph.replace(f"{DOMAIN}::TokenResidualNorm", name, inputs, [out], attrs)
    return Fused(name, (mix.product.name, norm.name))


def _normalizes_last_axis(norm: Node, shape: tuple[int | None, ...]) -> bool:
    """True if a norm is over exactly the last axis of a tensor of that shape (None for the batch)."""
    read = norm.reads(0).shape or ()
    axis = norm.attrs.get("axis", -1)
    return len(norm.outputs) == 1 and read[1:] == shape[1:] and axis in {-1, len(shape) - 1}


def _affine(graph: PlannedGraph, norm: Node, name: str, size: int) -> list[Tensor]:
    """Constants γ and β of a norm over `size` values."""
    affine = [tensor for tensor in norm.inputs[1:] if tensor is not None]
    if not all(tensor.is_constant and tensor.values.size == size for tensor in affine):
        raise DeclinedFusion(f"its gain and shift are not {size} constants each")
    scale = affine[0].values.reshape(-1)
    shift = affine[1].values.reshape(-1) if len(affine) > 1 else np.zeros_like(scale)
    return [graph.constant(f"{name}.gamma", scale), graph.constant(f"{name}.beta", shift)]


def _rounded_output(graph: PlannedGraph, norm: Node, x: Tensor) -> Tensor:
    """Output of the cast to the tokens' type behind a norm, or that of the norm."""
    reader = only_reader(graph, norm.outputs[0])
    if reader is not None and reader.op == "Cast" and reader.outputs[0].kind == x.kind:
        return reader.outputs[0]
    return norm.outputs[0]


def _attributes(norm: Node, products: tuple[str, ...]) -> dict[str, object]:
    """Attributes of the new node; ``norm_type`` is the planned type, although the kernel computes in FP32."""
    return {
        "epsilon": float(norm.attrs.get("epsilon", 1e-5)),
        "products": list(products),
        "norm": norm.name,
        "norm_type": norm.outputs[0].kind,
    }
